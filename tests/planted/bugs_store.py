"""Planted bugs of the file store, the seam around back ends, and the clear of a store. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

FORMAT, HEALS = "tests/storage/test_store_format.py", "tests/storage/test_store_heals.py"
IN_FLIGHT = "tests/storage/test_slots_in_flight.py"
IO = "tests/storage/test_slab_io.py"
FILES = "tests/storage/test_file_store.py"
TASKS = "tests/storage/test_store_tasks.py"
POOL = "tests/storage/test_mooncake_objects.py"
CHECKSUMS = "tests/storage/test_mooncake_checksums.py"
CHECKED, CLEAR = "tests/storage/test_checked_backend.py", "tests/storage/test_clear.py"
ATTEMPTS = "tests/storage/test_attempts.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "queued_batches_written_after_a_clear",
        "storage/writer.py",
        "            if sent < self.backend.fence:\n",
        "            if sent < (0, 0):\n",
        "batches that waited in a writer's queue are written after the store was cleared",
        ("tests/storage/test_writer.py::test_a_batch_that_waited_during_a_clear_is_not_written",),
    ),
    Mutation(
        "write_goes_on_after_a_clear_that_it_did_not_see",
        "storage/backends/checked.py",
        "        if self.clears.begun != begun + 1:\n",
        "        if self.clears.begun <= begun:\n",
        "a write that repeated a failed clear is written although another clear began in between",
        (
            f"{CLEAR}::test_a_write_that_repeats_a_failed_clear_is_not_written_if_another_clear_began",
        ),
    ),
    Mutation(
        "clear_answered_before_the_store_is_empty",
        "prefix_index/clears.py",
        """\
        if storage:
""",
        """\
        if storage and self._waiting:
""",
        "clear(storage=True) returns before the store is empty, and does not raise when it cannot "
        "be emptied",
        (f"{CLEAR}::test_a_failed_clear_raises_and_nothing_is_hit_until_one_succeeds",),
    ),
    Mutation(
        "generation_not_written",
        "storage/backends/slab_files.py",
        "meta = msgspec.structs.replace(self.meta, generation=generation)",
        "meta = self.meta",
        "cleared objects are found again by the next process",
        (f"{FORMAT}::test_a_clear_is_durable_when_it_returns",),
    ),
    Mutation(
        "entries_of_every_generation_found",
        "storage/backends/slab_table.py",
        "or generation != meta.generation:\n",
        "or generation > meta.generation:\n",
        "entries from before a clear are found at the next start",
        (f"{FORMAT}::test_a_clear_is_durable_when_it_returns",),
    ),
    Mutation(
        "refused_clear_passes",
        "storage/backends/slab_steps.py",
        "            raise StoreError(\n"
        '                f"{self._files.folder}: the store could not be cleared: {error}"\n'
        "            ) from error\n",
        "            self.pending = bool(error)\n            return\n",
        "a clear that the disk refused is reported as done",
        (
            f"{FORMAT}::test_a_clear_that_the_disk_refuses_is_an_error_and_nothing_is_hit_all_the_same",
        ),
    ),
    Mutation(
        "identity_not_compared",
        "storage/backends/slab_files.py",
        "        if (there.digest, there.block_bytes) != (self.meta.digest, "
        "self.meta.block_bytes):\n",
        "        if there.block_bytes != self.meta.block_bytes:\n",
        "the folder of another model, namespace or rank is taken over",
        (f"{FORMAT}::test_a_folder_moved_to_another_identitys_place_gives_misses_or_an_error",),
    ),
    Mutation(
        "first_page_checksum_ignored",
        "storage/backends/slab_table.py",
        "    if (\n"
        "        len(page) == PAGE\n"
        '        and xxhash.xxh3_64_intdigest(page[:BODY]).to_bytes(8, "little") == page[BODY:]\n'
        "    ):\n",
        '    if len(page) == PAGE and page[BODY:] != b"\\n" * 8:\n',
        "a flipped bit in the first page of the table is read as data",
        (f"{FORMAT}::test_every_bit_of_the_first_page_may_flip",),
    ),
    Mutation(
        "full_disk_freezes_the_store",
        "storage/backends/slab_medium.py",
        "        if now() < self._no_eviction_until:\n",
        "        if self._inventory.pending:\n",
        "a store on a full disk refuses every block from then on",
        (f"{HEALS}::test_a_disk_that_becomes_full_evicts_the_least_recently_used",),
    ),
    Mutation(
        "jobs_that_end_at_the_limit_of_a_close_are_lost",
        "storage/backends/slab_io.py",
        "            self._collect(self._queue)\n",
        "            pass\n",
        "a caller waits without limit, and the loop misses the events of the next store",
        ("tests/storage/test_slab_io.py::test_jobs_that_end_at_the_limit_of_a_close_are_answered",),
    ),
    Mutation(
        "slots_being_erased_are_lost",
        "storage/backends/slots.py",
        "        return self._erasing + len(self._leaving)\n",
        "        return len(self._leaving)\n",
        "a write beside a removal is refused, or evicts an object, although it fits",
        (IN_FLIGHT,),
    ),
    Mutation(
        "slots_being_read_are_lost",
        "storage/backends/slots.py",
        "        return self._erasing + len(self._leaving)\n",
        "        return self._erasing\n",
        "a write beside a read of a removed object is refused, or evicts an object",
        (IN_FLIGHT,),
    ),
    Mutation(
        "a_write_waits_for_a_slot_without_a_deadline",
        "storage/backends/slot_supply.py",
        "                if expired():\n                    return None, Outcome.LATE\n",
        "",
        "a write that waits for a slot has no deadline",
        (IN_FLIGHT,),
    ),
    Mutation(
        "quarantine_without_end",
        "storage/backends/slots.py",
        "self._free_again([slot for slot in self._until if self._strikes[slot] == 1])",
        "self._free_again([])",
        "slots that held bad objects are lost until the next start",
        (f"{HEALS}::test_slots_in_quarantine_come_back_when_they_prove_good",),
    ),
    Mutation(
        "moment_of_trouble_is_corruption",
        "storage/backends/slab_io.py",
        "        return self._files.failed(OSError(-code, os.strerror(-code)))\n",
        "        return Outcome.CORRUPT\n",
        "an input error of a moment costs the object and its slot",
        (f"{HEALS}::test_an_error_of_a_moment_is_unavailable_and_costs_nothing",),
    ),
    Mutation(
        "eviction_counts_as_corruption",
        "storage/backends/slab_medium.py",
        "if self._files.read_only or self.objects.get(key) != found:",
        "if self._files.read_only:",
        "an object that is evicted while it is read counts as corrupt",
        (f"{HEALS}::test_objects_that_go_while_they_are_read_are_misses_and_not_corrupt",),
    ),
    Mutation(
        "cancelled_open_keeps_the_lock",
        "storage/backends/file.py",
        "        except BaseException:\n            await self.close()\n            raise\n",
        "        except StoreError:\n            await self.close()\n            raise\n",
        "a cancelled open keeps the store's lock and its threads",
        (f"{HEALS}::test_a_cancelled_open_leaves_no_lock_and_no_thread",),
    ),
    Mutation(
        "child_keeps_the_lock",
        "storage/backends/slab_files.py",
        "register_at_fork(after_in_child=after_fork)\n",
        "",
        "a forked child keeps the store's lock after its parent was killed",
        (f"{HEALS}::test_a_forked_child_does_not_keep_the_lock",),
    ),
    Mutation(
        "links_followed",
        "files.py",
        "    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK\n",
        "    flags |= os.O_CLOEXEC | os.O_NONBLOCK\n",
        "a planted link makes the store write to another file",
        (f"{FORMAT}::test_a_planted_link_is_an_error_and_its_target_is_untouched",),
    ),
    Mutation(
        "files_as_the_umask_says",
        "files.py",
        "            os.fchmod(fd, FILE_MODE)\n",
        "            os.fchmod(fd, stat.S_IMODE(state.st_mode))\n",
        "a store that was readable by all stays so",
        (f"{FORMAT}::test_files_that_were_readable_by_all_are_closed",),
    ),
    Mutation(
        "short_report_taken_for_hits",
        "storage/containment.py",
        "if not isinstance(found, bytes | bytearray) or len(found) != count:",
        "if not isinstance(found, bytes | bytearray):",
        "outcomes that a back end left out do not count as failures",
        (f"{CHECKED}::test_read_reports_that_do_not_fit_are_no_hits",),
    ),
    Mutation(
        "leaked_cancellation_ends_the_job",
        "storage/containment.py",
        "            if task is not None and task.cancelling():\n",
        "            if task is not None:\n",
        "a CancelledError out of a client library counts as a cancellation of the job, and no "
        "answer is sent",
        (f"{CHECKED}::test_our_own_cancellation_passes_and_a_leaked_one_does_not",),
    ),
    Mutation(
        "faults_of_other_calls_open_the_circuit",
        "storage/containment.py",
        """\
        async def answer() -> T | None:
            try:
                return await call()
            except StoreUnavailable as error:
                lookups.failed(str(error))
                return None

        def checked(found: T | None) -> T:
            if found is None:
                return absent
            before = self.faults
""",
        """\
        before = self.faults

        async def answer() -> T | None:
            try:
                return await call()
            except StoreUnavailable as error:
                lookups.failed(str(error))
                return None

        def checked(found: T | None) -> T:
            if found is None:
                return absent
""",
        "one fault counts against every call in flight, and opens the circuit",
        (f"{CHECKED}::test_a_fault_counts_against_its_own_call_only",),
    ),
    Mutation(
        "probe_not_checked",
        "storage/containment.py",
        "        if 0 <= number <= most:\n",
        "        if number <= most:\n",
        "a back end that answers -3 makes an actor fail",
        (f"{CHECKED}::test_counts_out_of_range_are_nothing_found",),
    ),
    Mutation(
        "store_served_after_a_failed_clear",
        "storage/clears.py",
        "        return bool(self.running) or self.pending\n",
        "        return bool(self.running)\n",
        "after a clear that failed the store serves objects that it should have cleared",
        (
            "tests/storage/test_contract.py::TestMemory::test_a_clear_that_fails_is_an_error_and_nothing_is_found_until_one_succeeds",
        ),
    ),
    Mutation(
        "store_fails_without_a_log_event",
        "storage/attempts.py",
        "            log.warning(",
        "            log.debug(",
        "a store begins to fail without a logged warning",
        (f"{ATTEMPTS}::test_each_change_is_logged_once",),
    ),
    Mutation(
        "failures_begin_anew_with_each_attempt",
        "storage/attempts.py",
        "        if not self._failures:\n            self._since = now()\n",
        "        self._since = now()\n",
        "health() gives the time of the last failure as the time at which calls began to fail",
        (f"{ATTEMPTS}::test_the_breaker_opens_waits_and_tries_once",),
    ),
    Mutation(
        "reads_that_work_hide_writes_that_fail",
        "storage/attempts.py",
        '        self.writes = Attempts(store, "write")\n',
        "        self.writes = self.reads\n",
        "health() is ok while no write has ever worked, as long as some read does",
        (f"{CHECKED}::test_writes_that_fail_are_judged_apart_from_reads",),
    ),
    Mutation(
        "objects_that_are_there_count_as_written",
        "storage/attempts.py",
        "        if Outcome.OK in outcomes:\n",
        "        if Outcome.OK in outcomes or Outcome.EXISTS in outcomes:\n",
        "a table in memory that lists an object closes the circuit of a disk that is gone",
        (f"{ATTEMPTS}::test_an_answer_from_memory_neither_fails_nor_ends_a_failure",),
    ),
    Mutation(
        "conditions_forgotten_between_looks",
        "observe/health.py",
        "        system.troubles = begun\n",
        "",
        "health() gives the time of each look as the time at which the copy engine failed",
        ("tests/observe/test_health.py::test_since_is_when_a_condition_began_or_was_first_found",),
    ),
    Mutation(
        "failed_reads_delete_objects",
        "storage/reader.py",
        "                taken = [key for key, outcome in results if outcome == Outcome.OK]\n",
        "                taken = [key for key, _ in results]\n",
        "an exclusive store deletes objects whose read was unavailable or late",
        ("tests/storage/test_reader.py::test_an_exclusive_store_keeps_objects_whose_read_failed",),
    ),
    Mutation(
        "all_names_at_once",
        "storage/checked_inventory.py",
        "            for key in self._inner.iter_keys():\n",
        "            for key in self._inner.keys():\n",
        "a rank with millions of stored objects copies all names in one turn when it joins",
        ("tests/storage/test_checked_backend.py::test_names_are_passed_on_one_by_one",),
    ),
    Mutation(
        "direct_io_refused_to_one_thread",
        "storage/backends/slab_io.py",
        "if code == -errno.EINVAL] if direct else []",
        "if code == -errno.EINVAL and self._files.direct]",
        "of several threads to which direct I/O is refused at once, all but one lose their writes",
        (
            "tests/storage/test_file_store.py::test_threads_that_find_out_together_that_direct_io_is_refused_all_write",
        ),
    ),
    Mutation(
        "deadline_of_a_store_job_is_not_looked_at",
        "storage/backends/slab_io.py",
        "        if expired():\n            queue.cancel(number)\n",
        "        if False:\n            queue.cancel(number)\n",
        "objects of a batch are begun after its deadline because the disk was slow before",
        (f"{IO}::test_objects_that_were_not_begun_before_the_deadline_are_late",),
    ),
    Mutation(
        "slots_of_a_failed_group_leak",
        "storage/backends/slab_medium.py",
        "            else:\n                self._slots.give([slot])\n            outcomes.append(outcome)\n",
        "            outcomes.append(outcome)\n",
        "slots of objects that the disk refused are never used again",
        (f"{IO}::test_objects_of_a_run_that_the_disk_refuses_fail_alone[write]",),
    ),
    Mutation(
        "payloads_not_synced_before_their_entries",
        "storage/backends/slab_io.py",
        '        number = queue.seal(self._files.direct, sync, list(slots), b"".join(parts))\n',
        '        number = queue.seal(self._files.direct, False, list(slots), b"".join(parts))\n',
        "objects of a synced store are reported before the device has them",
        (
            f"{IO}::test_payloads_are_synced_before_entries_are_written_and_entries_afterwards",
            f"{IO}::test_entries_that_the_device_may_not_have_are_no_objects[slab]",
        ),
    ),
    Mutation(
        "slots_freed_without_their_entries",
        "storage/backends/slab_io.py",
        "        codes, _ = await wait_uncancelled(self._future(queue, queue.erase(sorted(slots))))\n",
        "        codes, _ = await wait_uncancelled(self._future(queue, queue.erase(slots[:1])))\n",
        "entries of evicted objects stay in the table beside new payloads",
        (f"{IO}::test_entries_of_slots_side_by_side_are_one_call_and_the_others_are_apart",),
    ),
    Mutation(
        "writes_to_a_deleted_table_count",
        "storage/backends/slab_medium.py",
        "        return Outcome.UNAVAILABLE if self._files.lost else outcome\n",
        "        return Outcome.OK if self._files.lost else outcome\n",
        "objects that are written to a deleted store count as stored",
        (f"{IO}::test_entries_are_not_written_to_a_table_that_was_moved",),
    ),
    Mutation(
        "objects_of_a_pool_unchecked",
        "storage/backends/mooncake_headers.py",
        "            bytes([Outcome.CORRUPT, Outcome.OK, without]),\n",
        "            bytes([Outcome.OK, Outcome.OK, without]),\n",
        "an object of a pool whose bytes changed is served as a hit",
        (f"{POOL}::test_a_changed_bit_of_payload_or_header_is_corrupt[0]",),
    ),
    Mutation(
        "last_object_of_a_split_batch_unsent",
        "storage/backends/mooncake_calls.py",
        "            yield slice(start, end)\n",
        "            yield slice(start, end - (left == 1))\n",
        "the last object of a batch is not written to a pool",
        (f"{POOL}::test_every_object_of_a_batch_is_verified[False]",),
    ),
    Mutation(
        "slots_beyond_the_arena",
        "storage/backends/mooncake_objects.py",
        "            and max(slots) < arena.num_slots\n",
        "",
        "a transfer writes memory behind the host slots",
        (f"{POOL}::test_only_slots_of_the_registered_arena_are_moved_without_views",),
    ),
    Mutation(
        "hits_without_verification",
        "storage/backends/mooncake_headers.py",
        "            return Compared(fits.translate(self._outcome_of_fit), self._refused(fits))\n",
        "            return Compared(bytes(len(fits)))\n",
        "a batch that arrived whole is served unverified",
        (f"{POOL}::test_every_object_of_a_batch_is_verified[True]",),
    ),
    Mutation(
        "objects_without_checksums_served",
        "storage/backends/mooncake_headers.py",
        "        without = Outcome.MISS if checksums else Outcome.OK\n",
        "        without = Outcome.OK\n",
        "a node that verifies serves objects that nothing verifies",
        (
            f"{CHECKSUMS}::test_a_node_that_verifies_misses_objects_without_checksums_and_counts_them",
        ),
    ),
    Mutation(
        "objects_without_checksums_removed",
        "storage/backends/mooncake_headers.py",
        "        without = Outcome.MISS if checksums else Outcome.OK\n",
        "        without = Outcome.CORRUPT if checksums else Outcome.OK\n",
        "a node that verifies removes the objects of nodes that do not",
        (f"{CHECKSUMS}::test_nodes_of_both_kinds_in_a_pool_remove_nothing_and_agree_in_the_end",),
    ),
    Mutation(
        "payload_checksums_ignored",
        "storage/backends/mooncake.py",
        "        headers = PoolHeaders(identity.digest, block_bytes, config.payload_checksums)\n",
        "        headers = PoolHeaders(identity.digest, block_bytes, False)\n",
        "the payloads of a pool are never verified",
        (f"{CHECKSUMS}::test_nodes_of_both_kinds_in_a_pool_remove_nothing_and_agree_in_the_end",),
    ),
    Mutation(
        "transfer_of_the_objects_before",
        "storage/backends/mooncake_objects.py",
        "                ahead = None if beside is None else self._ahead(batch.part(beside))\n",
        "                ahead = None if beside is None else self._ahead(batch.part(some))\n",
        "names of a batch are written to a pool with the objects of the transfer before",
        (f"{POOL}::test_objects_are_payloads_and_headers_of_the_format[96]",),
    ),
    Mutation(
        "store_grows_ahead_beyond_its_capacity",
        "storage/backends/slab_steps.py",
        "if enough or len(self._files.slabs) >= self._wanted() or",
        "if enough or",
        "a store takes a slab of disk space more than its capacity needs",
        (f"{TASKS}::test_a_store_does_not_grow_ahead_beyond_its_capacity",),
    ),
    Mutation(
        "full_store_asks_for_a_slab_with_each_batch",
        "storage/backends/slab_steps.py",
        "self._wanted() or now() < self.pause_until:",
        "self._wanted():",
        "each batch of a store on a full disk tries to add a slab",
        (f"{TASKS}::test_a_disk_that_is_full_is_asked_for_the_next_slab_after_a_pause",),
    ),
    Mutation(
        "other_layouts_take_what_they_preallocate",
        "storage/backends/file_survey.py",
        "            found += count_used(chunk, meta)\n",
        "            found += len(chunk) // meta.entry_bytes\n",
        "empty files of other layouts take the capacity of a store",
        (f"{HEALS}::test_a_capacity_counts_the_objects_of_other_layouts_in_the_folder",),
    ),
    Mutation(
        "good_objects_are_evicted_for_other_layouts",
        "storage/backends/file_survey.py",
        "            capacity = max(1, left, min(wanted, objects))\n",
        "            capacity = max(1, left)\n",
        "a store evicts its objects because another layout grows",
        (f"{HEALS}::test_a_capacity_counts_the_objects_of_other_layouts_in_the_folder",),
    ),
    Mutation(
        "files_made_anew_under_a_read",
        "storage/backends/file.py",
        "        while self.files.lost and (self._calls or self.threads.busy):\n",
        "        while self.files.lost and not self.threads:\n",
        "a read in flight goes on with the descriptors of other files",
        (f"{FILES}::test_files_are_not_made_anew_under_a_call_that_uses_the_old_ones",),
    ),
    Mutation(
        "lost_files_are_not_reported",
        "storage/worker.py",
        "        if self.backend.removed_outside():\n",
        "        if not self.backend:\n",
        "indexes list the blocks of a store whose files were deleted",
        (f"{FILES}::test_the_blocks_of_a_deleted_folder_are_reported_gone",),
    ),
    Mutation(
        "a_view_loses_a_cancelled_look",
        "storage/backends/slab_view.py",
        "            await wait_uncancelled(asyncio.ensure_future(self._follow()))\n",
        "            await self._follow()\n",
        "a view never finds objects that a cancelled look has read",
        (f"{FILES}::test_a_look_that_is_cancelled_loses_no_object",),
    ),
)
