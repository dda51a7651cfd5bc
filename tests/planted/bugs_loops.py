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
        if not total:
            return Refusal(envelope, NumBlocksUnset())
""",
        "",
        "a request before the number of blocks is set is refused as one that is too large",
        ("tests/cache/test_num_blocks.py::test_requests_are_refused_until_the_number_is_set",),
    ),
)
