"""Planted bugs of look-ups and of requests that wait for blocks. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "lookup_pins_the_prompt",
        "lookup.py",
        "    run, states = index.tree.peek(path, limit)\n",
        "    run, states = index.tree.pin(path, limit)\n",
        "a prompt that is looked up holds its blocks, which can never be evicted any more",
        ("tests/cache/test_lookup.py::test_a_lookup_takes_and_touches_nothing",),
    ),
    Mutation(
        "lookup_counts_what_storage_cannot_give",
        "lookup.py",
        "        if state & DEVICE:\n            break  # on its way",
        "        if state & DEVICE and not stored:\n            break  # on its way",
        "a look-up counts stored blocks below a block that is leaving the device as hits",
        ("tests/prefix_index/test_lookup.py::test_nothing_below_a_leaving_block_is_a_hit",),
    ),
    Mutation(
        "lookup_asks_a_store_that_fails",
        "storage/checked_inventory.py",
        'if self._clears.closed or calls.breaker.state() == "open" or calls.overdue():',
        "if self._clears.closed:",
        "blocks of a store that does not answer count as hits",
        ("tests/cache/test_lookup.py::test_blocks_of_a_store_that_fails_are_not_hits",),
    ),
)
