"""Planted bugs of copies, ranks, stores, and the runtime of actors. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "failed_copy_never_reported",
        "gpu_swapper/actor.py",
        "        self.tell(self._evictor, Copied(message.op, message.failed))",
        "        if len(message.failed) < message.pairs:\n"
        "            self.tell(self._evictor, Copied(message.op, message.failed))",
        "the completion of a copy that failed altogether is lost: its waiters never continue",
        ("tests/cache/test_faults.py::test_a_failed_load_is_a_miss_into_the_leases_own_blocks",),
    ),
    Mutation(
        "layers_reported_before_the_copy",
        "data_plane/engine.py",
        "                self.copy(direction, blocks, slots, layers)\n"
        "                if progress is not None and layers is not None:\n"
        "                    progress(layers.stop)\n",
        "                if progress is not None and layers is not None:\n"
        "                    progress(layers.stop)\n"
        "                self.copy(direction, blocks, slots, layers)\n",
        "a layer is reported as ready before its bytes are copied",
        ("tests/gpu_swapper/test_executor.py::test_reported_pairs_have_arrived",),
    ),
    Mutation(
        "layers_reported_with_the_first_piece",
        "data_plane/engine.py",
        "while reached < len(groups) and all(",
        "while reached < len(groups) and any(",
        "a layer is reported as ready when the first of several threads has copied its part",
        ("tests/planted/test_gaps_below.py::test_a_layer_is_there_when_all_its_pieces_are",),
    ),
    Mutation(
        "copies_of_the_last_rank_only",
        "data_plane/ranks/plane.py",
        "            failed |= {",
        "            failed = {",
        "a copy that failed on one rank counts if the last rank made it",
        ("tests/planted/test_gaps_below.py::test_a_copy_is_as_good_as_its_worst_rank",),
    ),
    Mutation(
        "best_rank_wins",
        "data_plane/ranks/store.py",
        "        worst = [0] * len(keys)\n"
        "        gone: set[bytes] = set()\n"
        "        for answer in answers:\n"
        "            for i, outcome in enumerate(outcomes_of(answer, len(keys))):\n"
        "                worst[i] = max(",
        "        worst = [len(BADNESS) - 1] * len(keys)\n"
        "        gone: set[bytes] = set()\n"
        "        for answer in answers:\n"
        "            for i, outcome in enumerate(outcomes_of(answer, len(keys))):\n"
        "                worst[i] = min(",
        "an object counts as read although only one rank has its share of it",
        ("tests/planted/test_gaps_below.py::test_an_object_is_as_good_as_its_worst_share",),
    ),
    Mutation(
        "silence_taken_for_the_end",
        "data_plane/ranks/state.py",
        "                self._report(rank, RankState.SILENT, f",
        "                rank.settle()\n                self._report(rank, RankState.SILENT, f",
        "blocks that a stopped rank may still write to are handed out again",
        (
            "tests/planted/test_gaps_below.py::test_requests_to_a_silent_rank_stay_open_until_it_answers",
        ),
    ),
    Mutation(
        "checksum_not_compared",
        "storage/backends/slab_io.py",
        "1: Outcome.CORRUPT, DELETED:",
        "1: Outcome.OK, DELETED:",
        "a rotten bit in a stored object is served as a hit",
        (
            "tests/storage/test_file_store.py::test_a_damaged_object_is_a_counted_miss_and_its_slot_is_left_alone",
        ),
    ),
    Mutation(
        "slots_overlap",
        "storage/backends/slab_files.py",
        "yield fd, index * self.meta.stride",
        "yield fd, max(0, index - 1) * self.meta.stride",
        "two slots of a slab lie on the same bytes",
        (
            "tests/storage/test_file_store.py::test_a_second_process_is_refused_with_the_holders_id_or_only_reads",
        ),
    ),
    Mutation(
        "found_before_it_is_written",
        "storage/inventory.py",
        "        return self.catalog.run(keys[:ready])",
        "        return self.catalog.run(keys)",
        "a probe finds objects that are still being written",
        ("tests/planted/test_gaps_below.py::test_nothing_is_found_before_it_is_written",),
    ),
    Mutation(
        "failed_seal_ignored",
        "storage/backends/owned_batches.py",
        "outcomes[i] = outcome if keys[i] in self._catalog else Outcome.REFUSED",
        "outcomes[i] = Outcome.OK if keys[i] in self._catalog else Outcome.REFUSED",
        "a write whose objects could not be sealed is announced as stored",
        ("tests/storage/test_file_store.py::test_a_full_or_failing_disk_leaves_nothing_behind",),
    ),
    Mutation(
        "never_synced",
        "storage/backends/file.py",
        'synced=durability == "synced"',
        'synced=durability == "written"',
        "with durability synced a write is announced before the device has it",
        ("tests/storage/test_file_store.py::test_a_full_or_failing_disk_leaves_nothing_behind",),
    ),
    Mutation(
        "slot_used_again_while_read",
        "storage/backends/slots.py",
        "            if slot in self._readers:\n",
        "            if slot in self._leaving:\n",
        "the slot of an object that goes is written anew under its reader",
        (
            "tests/planted/test_gaps_below.py::test_an_object_removed_during_a_read_keeps_its_place_until_the_end",
        ),
    ),
    Mutation(
        "cancelled_thread_not_awaited",
        "storage/backends/slab_io.py",
        "return await wait_uncancelled(future, lambda: queue.cancel(number))",
        "return await future",
        "a cancelled read goes on in its thread and writes into a slot that another block has by "
        "then",
        ("tests/planted/test_gaps_below.py::test_a_cancelled_read_has_ended_when_it_returns",),
    ),
    Mutation(
        "newest_object_evicted",
        "storage/catalog.py",
        "evicted.append(next(iter(self._names)))",
        "evicted.append(next(reversed(self._names)))",
        "a full store evicts the object that it has just stored",
        ("tests/storage/test_backends.py::test_the_catalog_is_an_exact_lru",),
    ),
    Mutation(
        "cancelled_put_delivers",
        "actor/channel.py",
        "                self._granted -= 1  # the place was promised to us: pass it on\n          "
        "      self._grant()\n",
        "                self._granted -= 1  # the place was promised to us: pass it on\n          "
        "      self._append(item)\n",
        "a put that was cancelled has delivered all the same, and its sender sends again",
        ("tests/actor/test_channel.py::test_exactly_once_under_cancellation_anywhere",),
    ),
    Mutation(
        "cancelled_put_keeps_the_place",
        "actor/channel.py",
        "                self._granted -= 1  # the place was promised to us: pass it on\n          "
        "      self._grant()\n",
        "                self._granted -= 1  # the place was promised to us: pass it on\n",
        "the place of a cancelled sender is not passed on: the next sender waits without end",
        ("tests/actor/test_channel.py::test_exactly_once_under_cancellation_anywhere",),
    ),
    Mutation(
        "cancelled_get_loses",
        "actor/channel.py",
        "            await self.wait_for_item()\n        return item\n",
        "            await self.wait_for_item()\n        await asyncio.sleep(0)\n        return item\n",
        "a get that is cancelled has taken an item that no receiver gets",
        ("tests/actor/test_channel.py::test_cancelling_a_parked_receiver_loses_nothing",),
    ),
    Mutation(
        "jobs_outlive_their_actor",
        "actor/jobs.py",
        "            await asyncio.wait(list(self.running), timeout=limit)\n",
        "            pass\n",
        "an actor is restarted while copies of its last incarnation still write",
        ("tests/actor/test_actor.py::test_an_actor_has_ended_when_its_jobs_have",),
    ),
    Mutation(
        "messages_to_a_failed_actor_are_read",
        "actor/mailbox_loop.py",
        "        if envelope.incarnation != self._context.incarnation or envelope.abandoned:\n",
        "        if envelope.abandoned:\n",
        "a restarted actor acts on messages to its last incarnation",
        (
            "tests/planted/test_gaps.py::test_messages_to_a_failed_actor_do_not_reach_its_next_incarnation",
        ),
    ),
    Mutation(
        "survivors_are_not_notified",
        "actor/supervisor.py",
        "            self._notify_survivors(group)\n",
        "",
        "an ask to an actor that failed waits without end",
        ("tests/cache/test_faults.py::test_any_actor_may_fail_at_any_time",),
    ),
    Mutation(
        "corrupt_object_stays",
        "storage/backends/owned_batches.py",
        "key for key in (*corrupt, *missing) if",
        "key for key in missing if",
        "a rotten object still counts as held after a read of it failed, and its loss is not "
        "reported to indexes",
        ("tests/planted/test_gaps_below.py::test_a_rotten_object_is_gone_with_the_first_look",),
    ),
    Mutation(
        "cleared_while_it_was_written",
        "storage/backends/owned_batches.py",
        "await self._medium.erase([keys[i] for i in saved if keys[i] not in self._catalog])",
        "await self._medium.erase([])",
        "objects that were being written when the store was cleared can be read afterwards",
        (
            "tests/storage/test_store_format.py::test_a_batch_that_was_being_written_when_the_store_was_cleared_does_not_come_back",
        ),
    ),
    Mutation(
        "rank_admitted_with_open_requests",
        "data_plane/ranks/leader.py",
        "        rank.settle()  # a rank sends its identity when everything from before has "
        "ended\n",
        "",
        "the leader waits without end for answers of a rank whose process failed",
        (
            "tests/planted/test_gaps_below.py::test_requests_to_a_failed_rank_have_ended_when_it_is_back",
        ),
    ),
    Mutation(
        "uncleared_rank_forgotten",
        "data_plane/ranks/store.py",
        "self._uncleared = len(done) < len(answers)",
        "self._uncleared = False",
        "a rank that could not be asked to clear its store serves blocks from before the clear",
        (
            "tests/planted/test_gaps_below.py::test_nothing_is_written_beside_objects_that_could_not_be_cleared",
        ),
    ),
)
