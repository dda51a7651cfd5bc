"""Planted bugs of the tiers for engines: `TierCache`, its storage and its copies. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

HOST = "tests/tier_cache/test_host_tier.py::"
STORAGE = "tests/tier_cache/test_storage.py::"
TIER = "tests/tier_cache/test_storage_tier.py::"
SINKS = "tests/tier_cache/test_sinks.py::"
RESTARTED = "tests/cache/test_flushed_after_restart.py::"
WINDOWS = "tests/tier_cache/test_save_windows.py::"
GPU = "tests/tier_cache/test_copy_worker_gpu.py::"
SHARED = "tests/tier_cache/test_shared_store.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "hit_evicted_within_its_step",
        "tier_cache/slots.py",
        "        self.held.add(key)\n",
        "",
        "a key that was answered HIT is evicted before the engine can pin it, and the engine dies",
        (HOST + "test_a_hit_is_not_evicted_before_the_end_of_the_step",),
    ),
    Mutation(
        "reset_frees_a_key_in_flight",
        "tier_cache/slots.py",
        "return key in self._blocks or key in self._stores or key in self._loads",
        "return key in self._blocks",
        "after a reset a completion of the old copy is taken for the new one of the same key",
        (HOST + "test_a_slot_in_use_at_a_reset_is_free_when_its_copy_ends",),
    ),
    Mutation(
        "parents_in_a_circle",
        "tier_cache/slots.py",
        "        if key in self._named:\n",
        "        if False:\n",
        "keys that name each other as parents keep their slots for good",
        (HOST + "test_keys_that_name_each_other_as_parents_can_be_evicted",),
    ),
    Mutation(
        "older_parent_is_never_a_victim",
        "cpu_evictor/slots.py",
        "block = tier.blocks[block.parent] if follows and block.parent in passed else None",
        "block = None",
        "a block that is older than its children is evicted only by chance",
        (
            HOST + "test_a_child_is_evicted_before_its_parent",
            "tests/cpu_evictor/test_slots.py::test_a_parent_is_a_victim_only_after_its_children",
        ),
    ),
    Mutation(
        "failed_fetch_is_a_hit",
        "tier_cache/storage_moves.py",
        "failed = frozenset(i for i, ok in enumerate(result.ok) if not ok)",
        "failed = frozenset[int]()",
        "a corrupt object becomes a HIT, and the engine computes with its bytes",
        (
            STORAGE + "test_damaged_objects_are_misses_and_can_be_stored_again",
            "tests/tier_cache/test_storage_model.py",
        ),
    ),
    Mutation(
        "failed_fetch_is_tried_again_and_again",
        "tier_cache/storage_moves.py",
        "                self._failed[key] = again\n",
        "                pass\n",
        "a request waits without end for an object that cannot be read",
        (TIER + "test_no_request_waits_for_an_object_that_cannot_be_read",),
    ),
    Mutation(
        "fetch_that_hangs_is_pending",
        "tier_cache/storage_moves.py",
        "            self._late.update(block.hash for block in self._in_flight[job])\n",
        "",
        "a request waits as long as a disk that hangs",
        (TIER + "test_a_fetch_that_hangs_is_a_miss_and_its_slot_stays_withheld",),
    ),
    Mutation(
        "fetched_key_is_not_spared",
        "tier_cache/storage_moves.py",
        "            self._slots.awaited[key] = until\n",
        "            pass\n",
        "two requests with more blocks than slots evict each other's fetched blocks without end",
        (TIER + "test_a_fetched_key_is_spared_until_it_is_asked_for",),
    ),
    Mutation(
        "identity_is_not_in_the_fingerprint",
        "tier_cache/settings.py",
        '"identity": dict(self.identity)',
        '"identity": {}',
        "an engine with another hash seed or dtype finds the bytes of the former one",
        (STORAGE + "test_blocks_of_another_identity_are_not_found",),
    ),
    Mutation(
        "views_are_not_checked",
        "storage/backends/views.py",
        "view.nbytes != block_bytes or ",
        "",
        "a store takes the memory behind a short view, or writes over it",
        (
            "tests/storage/test_views.py::test_unfit_views_are_not_written_and_evict_nothing",
            "tests/storage/test_views.py::test_unfit_views_are_not_read_into",
        ),
    ),
    Mutation(
        "tensor_that_moved_is_copied",
        "tier_cache/copies.py",
        "            if address_of(tensor) != address:\n",
        "            if address_of(tensor) == 0:\n",
        "a tensor that its framework has moved is copied from its old memory",
        ("tests/tier_cache/test_copy_worker.py::test_a_tensor_that_moved_is_noticed",),
    ),
    Mutation(
        "used_after_a_fork",
        "tier_cache/cache.py",
        "        SYSTEMS.add(self)\n",
        "",
        "a child uses the slots and the store of its parent",
        (
            STORAGE
            + "test_a_cache_made_before_a_fork_works_in_the_child_and_one_used_before_it_does_not",
        ),
    ),
    Mutation(
        "reset_leaves_stored_objects",
        "tier_cache/storage.py",
        "            self.call(self._loop.clear)\n",
        "            pass\n",
        "keys of before a reset are found again after a restart",
        (STORAGE + "test_events_of_both_tiers_are_exact",),
    ),
    Mutation(
        "full_host_tier_is_a_miss",
        "tier_cache/storage_moves.py",
        "return PENDING if self.waits.may_wait(key, storage.clock()) else MISS",
        "return MISS",
        "a stored block is computed again because every slot was in use for a moment",
        (STORAGE + "test_a_stored_key_waits_for_a_free_slot_and_the_hit_is_kept",),
    ),
    Mutation(
        "wait_for_a_slot_without_end",
        "tier_cache/owner.py",
        "        self._until[key] = now + AGAIN\n",
        "        self._until[key] = now\n",
        "a request that asks in every step is held up again and again by a full host tier",
        (STORAGE + "test_a_look_up_without_a_free_slot_ends",),
    ),
    Mutation(
        "block_is_evicted_before_its_save",
        "tier_cache/slots.py",
        "            if pins and key not in self._failed:\n",
        "            if False:\n",
        "of prompts that come at once, storage gets a part",
        (WINDOWS + "test_every_block_is_saved_however_few_slots_there_are",),
    ),
    Mutation(
        "store_waits_without_end",
        "tier_cache/cache.py",
        "        late = now - since >= self._full_wait_s  # 0 to shed\n",
        "        late = False\n",
        "a disk that hangs keeps the device blocks of finished requests",
        (WINDOWS + "test_stores_wait_for_a_bounded_time_and_are_counted",),
    ),
    Mutation(
        "stores_take_the_slots_of_look_ups",
        "tier_cache/cache.py",
        "spare = min(loads, -(-capacity * LOADS // 4))",
        "spare = 0",
        "requests wait for slots that each go to a save",
        (WINDOWS + "test_look_ups_get_slots_before_stores",),
    ),
    Mutation(
        "long_store_takes_every_slot",
        "tier_cache/cache.py",
        "share = -(-capacity // max(1, self._short[0]))",
        "share = capacity",
        "a long prompt is stored, and short ones are not",
        (WINDOWS + "test_a_long_store_leaves_slots_to_short_ones",),
    ),
    Mutation(
        "full_host_tier_is_not_searched_again",
        "tier_cache/slots.py",
        "        self._steps += 1\n",
        "",
        "slots that the end of a step releases are not found, and the key waits in vain",
        (STORAGE + "test_a_stored_key_waits_for_a_free_slot_and_the_hit_is_kept",),
    ),
    Mutation(
        "store_without_a_list_is_not_asked",
        "tier_cache/storage_moves.py",
        "return MISS if storage.lists else self._query(key)",
        "return MISS",
        "what a pool holds is forgotten at every restart",
        (SHARED + "test_objects_of_an_earlier_process_and_of_others_are_found",),
    ),
    Mutation(
        "a_miss_hides_what_is_behind_it",
        "storage/presence.py",
        "        start += run + 1\n",
        "        break\n",
        "the first block that a pool lacks hides the blocks of every other request of the step",
        (SHARED + "test_the_keys_of_a_step_are_asked_about_together_and_of_each_path",),
    ),
    Mutation(
        "query_that_hangs_is_pending",
        "tier_cache/storage.py",
        "return Lookup.PENDING if now - asked < self._timeout + 1.0 else Lookup.MISS",
        "return Lookup.PENDING",
        "a request waits as long as a pool that does not answer",
        (SHARED + "test_a_store_that_does_not_answer_a_look_up_costs_a_miss",),
    ),
    Mutation(
        "reset_deletes_by_default",
        "tier_cache/cache.py",
        "def reset(self, *, storage: bool = False) -> None:",
        "def reset(self, *, storage: bool = True) -> None:",
        "an engine that empties its caches deletes a store of terabytes",
        (STORAGE + "test_a_reset_keeps_stored_objects_unless_asked_to_delete_them",),
    ),
    Mutation(
        "pool_takes_any_view",
        "storage/backends/views.py",
        "    if not unfit:\n",
        "    if True:\n",
        "a pool takes the memory behind a short view, or writes over it",
        ("tests/storage/test_views.py::test_a_pool_uses_no_memory_of_unfit_views",),
    ),
    Mutation(
        "path_of_a_late_block_is_forgotten",
        "tier_cache/paths.py",
        "            self._name(names)\n            return\n",
        "            return\n",
        "a block whose path was described before it was stored is never announced",
        (SINKS + "test_blocks_are_announced_below_their_parents_and_removed_before_them",),
    ),
    Mutation(
        "notifier_that_lost_its_state_is_not_noticed",
        "tier_cache/sink_service.py",
        "            feed.resend = True\n",
        "            pass\n",
        "after a failure of FlushNotifier sinks have nothing of what the tiers hold",
        (SINKS + "test_what_sinks_are_sent_is_a_tree_and_exact",),
    ),
    Mutation(
        "dropped_messages_are_not_made_up_for",
        "tier_cache/paths.py",
        "            self.resend = True\n        if not self.resend:\n",
        "            return\n        if not self.resend:\n",
        "changes that the event loop was too slow for are lost to every sink",
        (SINKS + "test_what_sinks_are_sent_is_a_tree_and_exact",),
    ),
    Mutation(
        "tier_is_published_twice",
        "tier_cache/sinks.py",
        "    if both:\n",
        "    if False:\n",
        "an index reads the blocks of one tier from the engine and from kvactors",
        (SINKS + "test_a_tier_goes_to_the_engine_or_to_sinks",),
    ),
    Mutation(
        "keys_of_a_completion_are_not_checked",
        "tier_cache/cache.py",
        """\
        keys = checked_keys(keys)
        if self._owner.hands_over(partial(self.complete_load, keys)):
""",
        """\
        keys = list(keys)
        if self._owner.hands_over(partial(self.complete_load, keys)):
""",
        "a wrong key that another thread gives ends the next call of the owner with an unnamed error",
        (
            "tests/tier_cache/test_host_tier.py::test_wrong_keys_are_refused_in_the_calling_thread_and_change_nothing",
        ),
    ),
    Mutation(
        "wait_fails_with_the_notifier",
        "tier_cache/sink_service.py",
        "                await anyio.sleep(RESTART)\n",
        "                return False\n",
        "a wait for sinks ends with False although the notifier is back a moment later",
        (SINKS + "test_a_wait_outlasts_a_restart_of_the_notifier",),
    ),
    Mutation(
        "signal_between_making_a_folder_and_remembering_it",
        "terminable.py",
        "        with _signals_held_back():\n            folder =",
        "        if True:\n            folder =",
        "a command that is interrupted early leaves its temporary folder",
        (
            "tests/cli/test_terminable.py::test_a_signal_that_comes_while_a_folder_is_made_leaves_none",
        ),
    ),
    Mutation(
        "engine_that_waits_starves_its_fetches",
        "tier_cache/owner.py",
        "            time.sleep(PAUSE)\n",
        "            pass\n",
        "a prompt from storage takes four times as long in an engine that has nothing else to do",
        (
            "tests/tier_cache/test_pace.py::test_each_empty_step_after_the_first_is_followed_by_a_pause",
        ),
    ),
    Mutation(
        "copy_of_a_gpu_overtakes_its_compute",
        "data_plane/cuda/copy_queue.py",
        "            gpu.wait_for(self._ordering)\n",
        "            pass\n",
        "a block is stored before the model has written it",
        (GPU + "test_a_copy_begins_after_the_engines_work",),
    ),
    Mutation(
        "failed_copy_of_a_gpu_frees_its_slots_early",
        "data_plane/cuda/copy_queue.py",
        "            if code == 0 or (code in FATAL and code == job.code):\n",
        "            if code == 0 or job.error:\n",
        "slots are reused while a copy that was begun still writes to them",
        (GPU + "test_a_copy_that_could_not_be_begun_whole_fails_when_nothing_of_it_runs",),
    ),
    Mutation(
        "copies_of_a_gpu_that_was_reset_never_end",
        "data_plane/cuda/copy_queue.py",
        "            if code == 0 or (code in FATAL and code == job.code):\n",
        "            if code == 0:\n",
        "an engine waits for copies of a GPU that runs nothing any more",
        (GPU + "test_copies_of_a_gpu_that_was_reset_fail_and_nothing_waits_for_it",),
    ),
    Mutation(
        "slots_are_unpinned_under_another_worker",
        "data_plane/cuda/host_pin.py",
        "        if not pinned[1]:\n",
        "        if True:\n",
        "a GPU reads host memory that another worker of the process has unpinned",
        (GPU + "test_strided_tensors_and_several_blocks_in_a_slot_of_two_ranks",),
    ),
    Mutation(
        "memory_of_another_gpu_is_taken",
        "data_plane/cuda/driver.py",
        "        if kind != ON_DEVICE or found != ordinal:\n",
        "        if kind != ON_DEVICE:\n",
        "blocks are copied from a GPU by the streams of another one",
        (GPU + "test_tensors_of_other_memory_are_refused",),
    ),
    Mutation(
        "kernel_takes_rows_with_gaps",
        "data_plane/cuda/copies.py",
        """\
        by_kernel = (device.piece_bytes < choice.batch_from) & (
            device.strides == device.piece_bytes
        )
""",
        "        by_kernel = device.piece_bytes < choice.batch_from\n",
        "blocks of strided tensors are taken from the wrong places",
        (GPU + "test_strided_tensors_and_several_blocks_in_a_slot_of_two_ranks",),
    ),
    Mutation(
        "tier_slots_ignore_their_node",
        "tier_cache/slots.py",
        "            self._bind(numa_node)\n",
        "            pass\n",
        "host slots come from the memory of the wrong socket",
        ("tests/tier_cache/test_numa.py::test_slots_are_bound_to_their_node_and_hold_bytes",),
    ),
    Mutation(
        "wait_is_answered_by_an_empty_ledger",
        "tier_cache/sink_service.py",
        "return incarnation == self._stated and not feed.resend",
        "return True",
        "a wait for sinks ends before a restarted notifier has the state of the tiers",
        (SINKS + "test_a_wait_ends_only_when_the_state_was_sent_after_a_restart",),
    ),
    Mutation(
        "wait_of_a_cache_is_answered_by_an_empty_ledger",
        "waits.py",
        "        if at_rest or notifier.incarnation != self._stated_to:\n",
        "        self._stated_to = notifier.incarnation\n        if at_rest:\n",
        "a wait for sinks ends before a restarted notifier has the state of the tiers",
        (RESTARTED + "test_a_wait_after_a_restart_of_the_notifier_covers_what_was_held",),
    ),
    Mutation(
        "sink_of_another_package_is_no_kind",
        "config_faults.py",
        '    return {**data, str(field): CLASS_KIND, "class_path": kind}\n',
        "    return data\n",
        "a sink cannot be named by its module path in TOML",
        ("tests/flush_notifier/test_class_sinks.py",),
    ),
    Mutation(
        "suite_of_sinks_overlooks_blocks_that_are_gone",
        "testing/sink_contract.py",
        "lacking, wrong = expected - held, held - expected",
        "lacking, wrong = expected - held, set[bytes]()",
        "an author's sink that ignores losses passes the conformance suite",
        ("tests/testing/test_contracts.py::test_a_broken_sink_fails",),
    ),
    Mutation(
        "suite_of_layouts_overlooks_a_shared_fingerprint",
        "testing/layout_contract.py",
        "        assert len(set(prints)) == len(prints)",
        "        assert len(set(prints)) > 0",
        "an author's layout whose blocks mix with others passes the conformance suite",
        ("tests/testing/test_contracts.py::test_a_broken_layout_fails",),
    ),
    Mutation(
        "tensors_without_dlpack_are_refused",
        "device/tensors.py",
        '    if hasattr(tensor, "data_ptr"):\n        return _by_methods(tensor)\n',
        "",
        "Paddle 2.6, the newest GPU build on PyPI, cannot be used",
        ("tests/device/test_paddle_gpu.py::test_tensors_on_a_gpu_become_a_device",),
    ),
    Mutation(
        "old_paddle_is_taken",
        "device/paddle.py",
        "    if _numbers(version) < OLDEST and",
        "    if False and",
        "a Paddle without data_ptr() fails at the first copy, without a name",
        ("tests/device/test_paddle_gpu.py::test_a_version_that_is_too_old_is_named",),
    ),
    Mutation(
        "descriptor_silent_after_a_reset",
        "data_plane/cuda/copy_queue.py",
        '                entered.callback(driver.status, "cuCtxPopCurrent", None)\n',
        '                entered.callback(driver.read, "cuCtxPopCurrent")\n',
        "a GPU that is reset while a thread waits for its copies never wakes the engine",
        (
            "tests/tier_cache/test_copy_worker_gpu.py::test_copies_of_a_gpu_that_was_reset_fail_and_nothing_waits_for_it",
        ),
    ),
    Mutation(
        "calls_handed_over_are_nested",
        "tier_cache/owner.py",
        """\
        if self._catching_up:
            return
        self._catching_up = True
""",
        """\
        self._catching_up = True
""",
        "copies that other threads end between two steps are completed in the reverse order, and "
        "a few hundred of them end the engine",
        ("tests/tier_cache/test_owner.py::test_any_number_of_calls_is_made_in_order",),
    ),
    Mutation(
        "tier_cache_with_two_first_owners",
        "tier_cache/owner.py",
        "            if not self._starts():\n                raise self._wrong_thread()\n",
        "",
        "a second thread looks keys up while the first one opens the store, and gets misses",
        (
            "tests/tier_cache/test_owner.py::test_of_two_first_calls_one_opens_and_the_other_does_not_go_on",
        ),
    ),
)
