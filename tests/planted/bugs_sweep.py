"""Planted bugs of the comparison of eviction policies. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

SEARCHED = "tests/scenario/test_optimum.py::test_no_sequence_of_contents_hits_more"
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
)
