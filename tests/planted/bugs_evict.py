"""Planted bugs of the host tier's pure objects. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

REQUESTS = "tests/cpu_evictor/test_requests.py"
MEMORY = "tests/cpu_evictor/test_memory.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "movement_ends_with_its_first_window",
        "cpu_evictor/memory.py",
        "                    queue.append(movement)\n",
        "                    actions += movement.give_up()\n",
        "a movement takes the slots that are free at one moment, and stored blocks are computed again",
        ("tests/cpu_evictor/test_load.py::test_a_path_streams_through_a_few_slots",),
    ),
    Mutation(
        "long_load_keeps_its_turn",
        "cpu_evictor/memory.py",
        "                    queue.append(movement)\n",
        "                    queue.appendleft(movement)\n",
        "a short prompt waits for all of a long one",
        ("tests/cpu_evictor/test_load.py::test_loads_take_turns",),
    ),
    Mutation(
        "writes_are_sent_before_the_reads_of_a_probe",
        "cpu_evictor/actor.py",
        "        return actions + self._memory.write_held()\n",
        "        return self._memory.write_held() + actions\n",
        "a store of limited size evicts for write-backs what a request is about to read",
        (f"{MEMORY}::test_writes_wait_for_a_probe_and_come_after_its_reads",),
    ),
    Mutation(
        "load_of_a_reader_only_grows",
        "cpu_evictor/requests.py",
        "        if request.LOADS_PEER:\n"
        "            self._load[request.peer.name] -= request.size + 1\n",
        "",
        "requests go to the reader that was asked least since the start, however busy it is",
        (f"{REQUESTS}::TestRequests",),
    ),
    Mutation(
        "clear_is_forgotten_with_its_writer",
        "cpu_evictor/actor.py",
        "                    actions.append(self._memory.clear_store(request.op, request.salt))\n",
        "                    pass\n",
        "a clear of the store is never answered if its writer fails",
        (f"{REQUESTS}::test_a_writer_that_fails_ends_its_writes_and_is_sent_clears_again",),
    ),
    Mutation(
        "use_of_a_host_block_does_not_count",
        "cpu_evictor/slots.py",
        "                order.move_to_end(block_hash)\n",
        "                pass\n",
        "the host evicts the oldest blocks, however often they are used",
        (
            "tests/cpu_evictor/test_save.py::test_an_inclusive_host_keeps_a_copy_of_the_path",
            "tests/tier_cache/test_host_tier.py::test_touched_keys_are_evicted_last",
        ),
    ),
    Mutation(
        "load_is_answered_before_its_copies_end",
        "cpu_evictor/load.py",
        "        waiting = self._copies or self._is_fetching()\n",
        "        waiting = self._is_fetching()\n",
        "a load is answered, and its slots are given back, while its copies run",
        ("tests/cpu_evictor/test_load.py",),
    ),
    Mutation(
        "inclusive_load_stops_at_the_capacity",
        "cpu_evictor/load.py",
        "            block = host.add(\n",
        "            if not (stays or memory.exclusive):\n"
        "                break\n"
        "            block = host.add(\n",
        "of a path longer than an inclusive host tier fewer blocks are read from storage than it "
        "holds and indexes were sent",
        (
            "tests/cpu_evictor/test_load.py::test_of_an_inclusive_tier_blocks_beyond_the_capacity_pass_through",
        ),
    ),
    Mutation(
        "loads_end_while_a_device_store_writes",
        "cpu_evictor/load.py",
        "        self._copies[DEVICE_STORE] = []\n        return [\n            requests.fetch(",
        "        return [\n            requests.fetch(",
        "device blocks are granted again that a device store may still write",
        (
            (
                "tests/cpu_evictor/test_load.py"
                "::test_a_load_that_a_device_store_still_writes_is_stalled_when_copies_are_unavailable"
            ),
        ),
    ),
    Mutation(
        "load_that_ends_without_its_blocks_drops_them",
        "cpu_evictor/memory.py",
        "        return self.evict(found[space:])\n",
        "        hashes = join_hashes(block.hash for block in found[space:])\n"
        "        return [send(self._index, HostBlocksRemoved(hashes)), *self.remove(found[space:])]\n",
        "a cancelled or failed load drops the only copy of blocks that were to be written back",
        (
            "tests/cpu_evictor/test_load.py::test_blocks_evicted_for_lack_of_capacity_are_written_back",
        ),
    ),
    Mutation(
        "offloads_without_a_slot_are_not_counted",
        "cpu_evictor/offload.py",
        "            self._memory.counts.shed += len(self._waiting)\n",
        "            pass\n",
        "blocks that leave the device unwritten, for want of host slots, appear in no count",
        (
            "tests/cpu_evictor/test_offload.py::test_an_eviction_waits_for_slots_as_long_as_is_set_and_the_next_ones_not_at_all",
        ),
    ),
    Mutation(
        "eviction_for_a_read_is_written_before_it",
        "cpu_evictor/actor.py",
        "        self._requests.hold_writes()\n"
        "        # During a clear, blocks from before it may have been found.\n"
        "        actions = request.job.on_probed(found if self._requests.may_read else 0)\n"
        "        self._requests.release_writes()\n",
        "        actions = request.job.on_probed(found if self._requests.may_read else 0)\n",
        "a small store evicts the blocks that were just probed in favour of those evicted to make "
        "space for them",
        (f"{MEMORY}::test_writes_of_the_eviction_for_a_read_come_after_it",),
    ),
    Mutation(
        "block_that_the_device_did_not_take_waits_for_a_discard",
        "cpu_evictor/memory.py",
        "            self.host.mark_not_on_device(block)\n        return",
        "            pass\n        return",
        "a slot that was pinned when the device refused its block is never used again",
        (f"{MEMORY}::test_a_block_that_the_device_did_not_take_stays_when_its_other_use_ends",),
    ),
)
