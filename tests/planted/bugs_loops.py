"""Planted bugs of serving loops: sizes that are set late. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "index_is_not_sent_the_number_of_blocks",
        "wiring.py",
        """\
        self.index.try_tell(SetNumBlocks(blocks, *self.config.device.free_blocks(blocks)))
""",
        "",
        "a cache whose number of device blocks was set after opening refuses every request",
        ("tests/cache/test_num_blocks.py::test_a_thread_sets_the_number",),
    ),
    Mutation(
        "notifier_is_not_sent_its_limit",
        "wiring.py",
        """\
        self.notifier.try_tell(SetIdleLimit(self.idle_limit))
""",
        "",
        "the ledger forgets blocks that are still cached by the tiers' sizes",
        ("tests/cache/test_num_blocks.py::test_watermarks_and_limits_follow_the_number",),
    ),
    Mutation(
        "number_of_blocks_set_twice",
        "sizing.py",
        """\
    if system.sized:
""",
        """\
    if False:
""",
        "a second device takes the place of the one whose blocks are leased",
        ("tests/cache/test_num_blocks.py::test_the_number_is_set_once",),
    ),
    Mutation(
        "late_device_ends_the_cache",
        "sizing.py",
        """\
        opening = LateOpening(config.actors.open_timeout_s, system.shutdown)
""",
        """\
        opening = Opening(config.actors.open_timeout_s, system.shutdown)
""",
        "a copy engine that is late begins the shutdown of a cache that works",
        ("tests/cache/test_num_blocks.py::test_a_device_that_does_not_open_changes_nothing",),
    ),
    Mutation(
        "failed_join_of_ranks_is_final",
        "data_plane/ranks/leader.py",
        """\
            await uncancelled(self._reset())
""",
        """\
            await uncancelled(self.close())
""",
        "a leader that waited in vain for its ranks never admits one again",
        ("tests/cache/test_num_blocks.py::test_ranks_join_when_the_number_is_set",),
    ),
    Mutation(
        "request_before_the_number_never_fits",
        "prefix_index/admission.py",
        """\
            return NeverFits(claim, self.available(), total) if total else NumBlocksUnset()
""",
        """\
            return NeverFits(claim, self.available(), total)
""",
        "a request before the number of blocks is set is refused as one that is too large",
        ("tests/cache/test_num_blocks.py::test_requests_are_refused_until_the_number_is_set",),
    ),
    Mutation(
        "decode_without_a_block_is_an_error",
        "scenario/serving.py",
        """\
            if full:
                await self._preempt(self._scheduler.victim())
""",
        """\
            for job in full:
                self._drop(job, NoRoom(1, 0))
            full = []
""",
        "a request of a replay whose decode step finds no free block ends with NoRoom",
        (
            "tests/scenario/test_serving.py::test_a_decode_step_without_a_free_block_preempts_the_last_arrival",
        ),
    ),
    Mutation(
        "failed_load_without_blocks_ends_the_request",
        "scenario/serving.py",
        """\
        except NoRoom:  # blocks of a load that failed could not be replaced
""",
        """\
        except ZeroDivisionError:
""",
        "a request of a replay whose load failed ends with NoRoom although it fits the device",
        ("tests/scenario/test_serving.py::test_every_request_that_fits_is_served",),
    ),
    Mutation(
        "slow_process_spoils_the_figures",
        "scenario/serving.py",
        """\
        self._began += max(0.0, self._wall() - time) / self._speed
""",
        "        return\n",
        "a replay on a busy machine reports latencies of the machine, not of the serving loop",
        ("tests/scenario/test_serving.py::test_a_process_that_is_too_slow_changes_no_figure",),
    ),
    Mutation(
        "blocks_verified_on_the_loop",
        "scenario/replay.py",
        "ThreadModel(cache.device) if timed else None",
        "None",
        "a timed replay verifies blocks in the loop's thread and blocks it",
        ("tests/scenario/test_serving.py::test_blocks_are_computed_and_verified_beside_the_loop",),
    ),
    Mutation(
        "earliest_request_is_preempted",
        "scenario/batching.py",
        """\
        return max(self.decoding.values())
""",
        """\
        return min(self.decoding.values())
""",
        "the request that has waited longest gives way to later ones",
        (
            "tests/scenario/test_serving.py::test_a_decode_step_without_a_free_block_preempts_the_last_arrival",
        ),
    ),
    Mutation(
        "loaded_host_copy_is_gone_before_the_device_is_announced",
        "cpu_evictor/load.py",
        """\
            if block.state is SlotState.LEAVING:
                host.mark_on_device(block)
""",
        """\
            if block.state is SlotState.LEAVING and block.pins == 1:
                actions += memory.remove([block])
""",
        "a block that is loaded from an exclusive host tier is on no index for a moment",
        ("tests/cache/test_never_nowhere.py::test_from_an_exclusive_host_tier_back_to_the_device",),
    ),
)
