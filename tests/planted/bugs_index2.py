"""Planted bugs of block hashes that are made on demand, and of the index's benchmark. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

HASHING = "tests/prefix_index/test_hashing.py"
DEVICE = f"{HASHING}::test_a_device_that_no_sink_follows_hashes_nothing"
MACHINE = "tests/prefix_index/test_index_machine.py"
BEHIND = f"{MACHINE}::test_a_lease_computes_into_no_block_that_arrived_behind_a_load_that_failed"
LAYER = f"{MACHINE}::test_a_layer_is_not_answered_while_another_lease_loads_blocks_that_are_to_be_computed"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "blocks_of_a_host_tier_are_hashed_late",
        "wiring.py",
        "            hashes=bool(self.sinks) or host_tier or stored,\n",
        "            hashes=bool(self.sinks),\n",
        "the host tier gets evictions without hashes",
        (f"{DEVICE}[host]", f"{DEVICE}[storage]"),
    ),
    Mutation(
        "blocks_of_a_device_alone_are_hashed",
        "wiring.py",
        "            hashes=bool(self.sinks) or host_tier or stored,\n",
        "            hashes=True,\n",
        "a cache that no sink follows spends most of a commit on hashes",
        (f"{DEVICE}[device]",),
    ),
    Mutation(
        "eviction_hashes_what_nothing_needs",
        "prefix_index/index.py",
        "tree.evict(count, hashes=index.hashes)",
        "tree.evict(count)",
        "a device alone hashes every block that it evicts, and all blocks above it",
        (f"{HASHING}::test_an_eviction_from_a_device_alone_has_no_hashes",),
    ),
    Mutation(
        "tree_after_a_clear_hashes_late",
        "prefix_index/index.py",
        "    index.tree = make(index.block_size, index.capacity, hashes=index.hashes, touch=False)\n",
        "    index.tree = make(index.block_size, index.capacity, hashes=False, touch=False)\n",
        "after a clear, reports of the host tier hash the whole tree within a turn",
        (f"{HASHING}::test_a_tree_that_is_renewed_hashes_as_the_one_before",),
    ),
    Mutation(
        "owner_computes_into_blocks_that_others_hit",
        "prefix_index/loads.py",
        "finish_load(load.nodes, 0 if lost else num_loaded)",
        "finish_load(load.nodes, num_loaded)",
        "a load above fails, another request computes its blocks, and the owner of the load below "
        "writes to blocks that others read",
        (BEHIND,),
    ),
    Mutation(
        "sharer_computes_into_blocks_that_others_hit",
        "prefix_index/loads.py",
        "used = 0 if load.is_below_a_gap(lease) else resident",
        "used = resident",
        "the same of a lease that has joined the load, once its owner has ended",
        (f"{MACHINE}::test_a_lease_that_joined_such_a_load_computes_into_new_blocks",),
    ),
    Mutation(
        "layer_answered_below_a_failed_load",
        "prefix_index/leases.py",
        "(layer < arrived and not self._computes_into_loads(lease))",
        "layer < arrived",
        "the caller computes into the targets of another lease's load",
        (LAYER,),
    ),
    Mutation(
        "layer_answered_without_the_new_table",
        "prefix_index/leases.py",
        "tuple(lease.path.table()) if lease.changed else None",
        "None",
        "after a load that failed, the caller of wait_layer computes into blocks of another lease",
        (LAYER,),
    ),
)
