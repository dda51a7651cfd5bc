"""Planted bugs of the tree rule: a sink's view is a tree after every event. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/flush_notifier/test_tree_rule.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "device_block_without_the_one_above",
        "flush_notifier/filter.py",
        "            0\n"
        "            if not above\n"
        "            else table[tiers]\n"
        "            if above & Tier.DEVICE\n"
        "            else table[tiers] & ~int(Tier.DEVICE)\n",
        "            0 if not above else table[tiers]\n",
        "an index that is a radix tree of the device drops a block that is announced there while "
        "the block above it is on the host",
        (f"{TESTS}::test_a_block_on_the_device_waits_for_the_block_above_it_on_the_device",),
    ),
    Mutation(
        "block_below_nothing",
        "flush_notifier/filter.py",
        "            0\n"
        "            if not above\n"
        "            else table[tiers]\n"
        "            if above & Tier.DEVICE\n"
        "            else table[tiers] & ~int(Tier.DEVICE)\n",
        "            table[tiers] if above & Tier.DEVICE else table[tiers] & ~int(Tier.DEVICE)\n",
        "a block is announced in storage while the block above it is nowhere",
        (f"{TESTS}::test_blocks_below_a_block_that_is_nowhere_are_not_announced",),
    ),
    Mutation(
        "gain_does_not_spread",
        "flush_notifier/ledger.py",
        "                    looked = yield from self._spread(block, looked)\n"
        "        yield from tree.trim()\n"
        "\n"
        "    def clear(",
        "                    looked += 1\n        yield from tree.trim()\n\n    def clear(",
        "blocks whose path was interrupted are never announced again",
        (f"{TESTS}::test_a_block_on_the_device_waits_for_the_block_above_it_on_the_device",),
    ),
    Mutation(
        "losses_before_gains",
        "flush_notifier/runs.py",
        "            not run.resident,\n",
        "            run.resident,\n",
        "a block that moves between tiers is nowhere for a moment, and an index drops the blocks "
        "below it",
        (f"{TESTS}::test_a_block_that_moves_between_tiers_is_never_nowhere",),
    ),
    Mutation(
        "removal_before_those_below",
        "flush_notifier/selection.py",
        "            while below is not None and (below in losses or not loss_of(below, sink)):",
        "            while below is not None:",
        "a block is removed in one batch and the blocks below it in a later one, or never",
        (f"{TESTS}::test_blocks_that_come_back_while_their_removal_waits_are_not_cut_off",),
    ),
    Mutation(
        "removal_without_the_gain_of_the_block",
        "flush_notifier/selection.py",
        "            if gain_of(node, sink) and node not in self.gains:",
        "            if False:",
        "a block leaves one tier in a batch and is announced on the next tier in a later one",
        (f"{TESTS}::test_a_removal_takes_the_gain_of_the_same_block_along",),
    ),
    Mutation(
        "runs_of_several_tiers_ordered_by_depth_alone",
        "flush_notifier/runs.py",
        "    alike = selection.losses if len(losses) > 1 else None\n",
        "    alike = None\n",
        "a long run on one tier is removed before a shorter one on another tier that is below its "
        "beginning",
        (f"{TESTS}::test_runs_of_several_tiers_go_from_the_deepest_block_on",),
    ),
    Mutation(
        "refused_gain_counts_as_there",
        "flush_notifier/selection.py",
        "    return block.due[sink] & ~(view & ~(view >> UNSURE))",
        "    return block.due[sink] & ~(view | view >> UNSURE)",
        "a block is announced although the announcement of the block above it was refused",
        (f"{TESTS}::test_a_refused_gain_is_sent_before_the_blocks_below_it",),
    ),
    Mutation(
        "interrupted_paths_count_as_differing",
        "flush_notifier/checks.py",
        "        above = (\n"
        "            ledger.scopes.above_first(block)\n"
        "            if block.parent is None\n"
        "            else expected.of(block.parent.hash).get(block.parent.hash, 0)\n"
        "        )\n",
        "        above = int(ALL_TIERS)\n",
        "divergence counts blocks that cannot be announced",
        (f"{TESTS}::test_blocks_that_cannot_be_announced_do_not_differ",),
    ),
    Mutation(
        "parents_before_children_in_a_removal",
        "flush_notifier/sinks/kv_encoder.py",
        "        return self._native.removed(task.hashes, task.tier) if task.count else self.cleared\n",
        "        backwards = range(len(task.hashes), 0, -HASH_BYTES)\n"
        '        hashes = b"".join(task.hashes[end - HASH_BYTES : end] for end in backwards)\n'
        "        return self._native.removed(hashes, task.tier) if task.count else self.cleared\n",
        "a removal lists parents before children, and in parts of max_blocks sends them in this "
        "order",
        ("tests/flush_notifier/test_kv_events.py::test_bytes_are_as_documented",),
    ),
    Mutation(
        "gone_from_the_host_before_it_is_stored",
        "cpu_evictor/memory.py",
        "        for block in victims[shed:]:\n            host.move",
        "        actions += self._report_gone(victims[shed:], Reason.CPU_EVICTION)\n"
        "        for block in victims[shed:]:\n"
        "            host.move",
        "a block on its way to storage is announced nowhere, and indexes drop the blocks below it",
        ("tests/cache/test_never_nowhere.py::test_from_the_host_to_storage",),
    ),
    Mutation(
        "passing_block_is_nowhere",
        "cpu_evictor/offload.py",
        "memory.announce([block.hash for block in landed])",
        "memory.announce([block.hash for block in landed if block.state is SlotState.RESIDENT])",
        "a block that passes through host memory to storage is announced nowhere until it is "
        "stored",
        ("tests/cache/test_never_nowhere.py::test_through_the_host_to_storage",),
    ),
)
