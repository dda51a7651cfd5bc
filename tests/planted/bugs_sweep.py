"""Planted bugs of the comparison of eviction policies. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

SEARCHED = "tests/scenario/test_optimum.py::test_no_sequence_of_contents_hits_more"
RECORDED = "tests/scenario/test_trace_recording.py"
MODELLED = "tests/native/test_retain.py::test_it_evicts_what_the_model_evicts"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "optimum_evicts_more_than_it_must",
        "scenario/optimum.py",
        """\
            dropped = min(kept[request], held - size)
""",
        """\
            dropped = kept[request]
""",
        "the offline optimum hits less than a real cache may",
        (SEARCHED,),
    ),
    Mutation(
        "optimum_counts_the_last_block",
        "scenario/sweep.py",
        """\
        most = len(path) if whole else len(path) - 1
""",
        """\
        most = len(path)
""",
        "a sweep counts hits of the last block of a prompt, which is computed again",
        ("tests/scenario/test_optimum.py::test_a_cache_of_every_block_hits_every_known_block",),
    ),
    Mutation(
        "refused_request_is_not_counted",
        "scenario/policy_run.py",
        """\
            self.refused += 1
""",
        "",
        "requests larger than the device are missing in the counts",
        ("tests/scenario/test_policy_run.py::test_without_statistics_it_is_lru",),
    ),
    Mutation(
        "policy_run_has_no_clock",
        "scenario/policy_run.py",
        """\
        tree.advance(now)
""",
        "",
        "a sweep runs RETAIN as if no time passed",
        (MODELLED,),
    ),
    Mutation(
        "policy_run_has_no_output_lengths",
        "scenario/policy_run.py",
        """\
        tree.touch(path, output, ends, returns_in)
""",
        """\
        tree.touch(path, -1, ends, returns_in)
""",
        "a sweep runs RETAIN without the lengths of the outputs, and reports fewer hits",
        (MODELLED,),
    ),
    Mutation(
        "lru_rates_of_inclusive_tiers_are_summed",
        "scenario/lru_rates.py",
        """\
        exclusive=config.host.mode == "exclusive",
""",
        """\
        exclusive=True,
""",
        "the hits of inclusive LRU tiers are reported as those of exclusive ones",
        ("tests/scenario/test_sweep_report.py::test_the_tiers_of_a_config_hit_as_its_replay",),
    ),
    Mutation(
        "replay_reports_no_lru",
        "scenario/replay.py",
        """\
    if not timed:
        report.hit_rate_lru =""",
        """\
    if timed:
        report.hit_rate_lru =""",
        "a replay under RETAIN has no hit rates of LRU beside its own",
        ("tests/scenario/test_lru_rates.py::test_they_are_those_of_an_lru_replay",),
    ),
    Mutation(
        "a_recording_goes_on_after_a_failed_write",
        "scenario/trace_recording.py",
        "            self._end(brief(error))\n",
        "            self.error = brief(error)\n",
        "a recording on a full disk stays in every message's way, and nobody is told",
        (f"{RECORDED}::test_a_full_disk_ends_the_recording_and_nothing_else",),
    ),
    Mutation(
        "a_failed_write_leaves_part_of_a_line",
        "scenario/trace_recording.py",
        "                os.ftruncate(self._fd, self._size)\n",
        "                os.fsync(self._fd)\n",
        "the trace of a full disk cannot be read",
        (f"{RECORDED}::test_a_full_disk_ends_the_recording_and_nothing_else",),
    ),
    Mutation(
        "a_resumed_request_is_recorded_twice",
        "scenario/trace_recording.py",
        "            self._preempted[request.request_id] = request\n            return\n",
        "            pass\n",
        "a trace has a line more for each preemption, and hits that the run did not count",
        (f"{RECORDED}::test_lines_are_in_the_order_of_arrival_and_one_for_each_request",),
    ),
    Mutation(
        "output_in_events_is_taken_for_a_prompt",
        "scenario/event_recording.py",
        "        elif len(hashes) == 1 or request.output_length:\n",
        "        elif request.output_length:\n",
        "the decoded blocks of an engine count as look-ups without a hit",
        (f"{RECORDED}::test_a_chunked_prompt_and_its_output_are_one_request",),
    ),
    Mutation(
        "a_replay_lacks_the_rest_of_a_prompt",
        "scenario/replay.py",
        "        if 0 < rest < cache.block_size:",
        "        if cache.block_size < rest < cache.block_size:",
        "the last block of a repeated prompt is computed again, which the recorded run did not do",
        (f"{RECORDED}::test_a_replay_with_every_block_cached_hits_as_the_run_did",),
    ),
)
