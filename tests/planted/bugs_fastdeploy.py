"""Planted bugs of the manager for FastDeploy. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

HERE = "tests/integrations/fastdeploy"
BEHAVIOURS = f"{HERE}/test_behaviours.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "fastdeploy_frees_evicted_blocks_before_their_copy",
        "integrations/fastdeploy/device_cache.py",
        """\
        lower, reports = self.lower, self.reports
        if lower is not None:
""",
        """\
        lower, reports = self.lower, self.reports
        self.blocks.evict(block.block for block in victims)
        victims = []
        if lower is not None:
""",
        "evicted blocks are free and their bytes are in no host slot",
        (f"{BEHAVIOURS}::test_device_blocks_come_first_then_those_of_the_host",),
    ),
    Mutation(
        "fastdeploy_match_that_fails_keeps_its_references",
        "integrations/fastdeploy/matching.py",
        """\
            index.release(record.nodes)
            record.nodes = []
            raise
""",
        """\
            raise
""",
        "a request that could not be admitted holds device blocks that nothing releases",
        (
            f"{BEHAVIOURS}::test_host_blocks_that_do_not_fit_on_the_device_are_an_error_that_holds_nothing",
        ),
    ),
    Mutation(
        "fastdeploy_second_match_holds_twice",
        "integrations/fastdeploy/manager.py",
        """\
            self._cache.release(request)
""",
        "",
        "a request that is matched again before it is released holds its blocks for good",
        (f"{BEHAVIOURS}::test_a_second_match_without_a_release_holds_the_blocks_once",),
    ),
    Mutation(
        "fastdeploy_duplicate_replaces_the_first_block",
        "integrations/fastdeploy/requests.py",
        """\
            if node is not None:
                self._index.hold([node])
""",
        """\
            if node is not None and not node.refs:
                self._index.hold([node])
""",
        "the second of two requests with one block takes the place of the first in the index",
        (f"{BEHAVIOURS}::test_a_block_of_two_requests_has_one_owner",),
    ),
    Mutation(
        "fastdeploy_own_copy_of_a_shared_block_is_lost",
        "integrations/fastdeploy/requests.py",
        """\
                record.spares.append(block)
""",
        """\
                pass
""",
        "a request's own copy of a block that another request has indexed is never free again",
        (f"{BEHAVIOURS}::test_a_block_of_two_requests_has_one_owner",),
    ),
    Mutation(
        "fastdeploy_caches_the_last_output_token",
        "integrations/fastdeploy/manager.py",
        """\
        last = 1 if len(sequence_of(task, "output_token_ids")) else 0
""",
        """\
        last = 0
""",
        "a block counts as full whose last token the model has not computed",
        (
            f"{BEHAVIOURS}::test_the_last_output_token_is_not_computed",
            f"{HERE}/test_scheduler.py::test_device_and_host",
        ),
    ),
    Mutation(
        "fastdeploy_takes_a_block_twice",
        "integrations/fastdeploy/requests.py",
        """\
        self.check_held(returned, request)
        for block in blocks:
""",
        """\
        for block in blocks:
""",
        "a block that is free already, or another request's, is taken back",
        (f"{BEHAVIOURS}::test_a_block_that_the_engine_does_not_hold_is_refused",),
    ),
    Mutation(
        "fastdeploy_highest_block_first",
        "integrations/fastdeploy/requests.py",
        """\
        taken = [heappop(self._free) for _ in range(count)]
""",
        """\
        taken = [self._free.pop() for _ in range(count)]
""",
        "blocks are not handed out lowest first",
        (f"{BEHAVIOURS}::test_a_fresh_pool_gives_ids_0_and_1_and_the_gauge_falls",),
    ),
    Mutation(
        "fastdeploy_parent_never_becomes_evictable",
        "integrations/fastdeploy/requests.py",
        """\
                parent.children -= 1
                if not parent.refs:
                    self._enqueue(parent)
""",
        """\
                parent.children -= 1
""",
        "a block whose children have left can never be evicted",
        (
            f"{BEHAVIOURS}::test_a_larger_eviction_than_the_host_has_slots_keeps_the_start_of_the_path",
        ),
    ),
    Mutation(
        "fastdeploy_evicts_blocks_in_use",
        "integrations/fastdeploy/requests.py",
        """\
        if block.refs or block.children or block.used != used:
            return False
""",
        """\
        if block.children:
            return False
""",
        "a block that a request holds again is evicted",
        (f"{BEHAVIOURS}::test_blocks_that_a_request_holds_are_not_evicted",),
    ),
    Mutation(
        "fastdeploy_failed_load_counts_as_a_hit",
        "integrations/fastdeploy/matching.py",
        """\
        if not loaded:
            cache.blocks.give(blocks, request)
            return False
""",
        "",
        "a request starts from blocks whose bytes did not arrive",
        (
            f"{BEHAVIOURS}::test_a_failed_copy_to_the_device_is_a_miss",
            f"{HERE}/test_scheduler.py::test_with_faults_of_storage_and_copies",
        ),
    ),
    Mutation(
        "fastdeploy_failed_offload_counts_as_kept",
        "integrations/fastdeploy/lower_tiers.py",
        """\
                self.tiers.complete_store(found.keys, success=not error)
""",
        """\
                self.tiers.complete_store(found.keys, success=True)
""",
        "a host slot whose copy failed is loaded later",
        (
            f"{BEHAVIOURS}::test_a_failed_copy_to_the_host_loses_the_block_and_nothing_else",
            f"{HERE}/test_scheduler.py::test_with_faults_of_storage_and_copies",
        ),
    ),
    Mutation(
        "fastdeploy_release_during_a_write_frees_at_once",
        "integrations/fastdeploy/requests.py",
        """\
        ended = [record for record in self._leaving if not record.writers]
""",
        """\
        ended = list(self._leaving)
""",
        "the blocks of a request are reused while they are being written to storage under its hashes",
        (f"{HERE}/test_threads.py::test_a_release_during_a_write_frees_the_blocks_after_it",),
    ),
    Mutation(
        "fastdeploy_reset_frees_blocks_of_writes",
        "integrations/fastdeploy/device_cache.py",
        """\
        self.lose(read, lambda: not any(record.writers for record in written))
""",
        "",
        "a reset frees blocks that are being written to storage",
        (f"{HERE}/test_threads.py::test_a_pause_resets_without_the_lock_while_a_request_finishes",),
    ),
    Mutation(
        "fastdeploy_calls_may_overlap",
        "integrations/fastdeploy/manager.py",
        """\
            self._next_turn.get(timeout=self._turn_s)
""",
        """\
            pass
""",
        "a call of another thread begins during one that waits for a copy",
        (f"{HERE}/test_threads.py::test_a_call_waits_for_another_one_no_longer_than_it_may_take",),
    ),
    Mutation(
        "fastdeploy_writes_every_block_again",
        "integrations/fastdeploy/lower_tiers.py",
        """\
            return {key for key in keys if self._storage.contains(key)}
""",
        """\
            return set()
""",
        "blocks that storage has are copied and written again at every finish",
        (f"{BEHAVIOURS}::test_only_the_blocks_that_storage_lacks_are_written",),
    ),
    Mutation(
        "fastdeploy_new_weights_find_old_blocks",
        "integrations/fastdeploy/engine_tiers.py",
        """\
        return CacheScope(cache.model, cache.namespace)
""",
        """\
        return CacheScope(cache.model, "default")
""",
        "blocks of an earlier version of the weights are hits of the next one",
        (
            f"{HERE}/test_weights.py::test_blocks_of_earlier_weights_are_not_found_in_fastdeploys_order",
        ),
    ),
    Mutation(
        "fastdeploy_attention_store_beyond_the_tensors",
        "integrations/fastdeploy/engine_tiers.py",
        """\
            self.check_blocks(num_blocks)
            self._open_services()
""",
        """\
            if cache.lower is not None:
                self.check_blocks(num_blocks)
            self._open_services()
""",
        "AttentionStore reads and writes memory beyond the cache tensors",
        (f"{HERE}/test_launch.py::test_tensors_of_too_few_blocks_are_refused",),
    ),
    Mutation(
        "fastdeploy_reads_media_by_tokens",
        "integrations/fastdeploy/matching.py",
        """\
        if direct is None or record.has_media or count < 1 or cache.interrupted():
""",
        """\
        if direct is None or count < 1 or cache.interrupted():
""",
        "a request with an image gets the blocks of one with the same tokens and another image",
        (f"{HERE}/test_indexes.py::test_media_are_not_read_from_a_store_of_tokens",),
    ),
    Mutation(
        "fastdeploy_gives_out_blocks_that_an_sdk_may_write",
        "integrations/fastdeploy/matching.py",
        """\
            cache.lose(blocks, late.answer.done)  # the SDK may write them before it returns
            return
""",
        """\
            got = 0
""",
        "blocks are given to requests while a call that does not return may still write them",
        (f"{HERE}/test_indexes.py::test_blocks_that_an_sdk_may_still_write_are_not_given_out",),
    ),
    Mutation(
        "fastdeploy_reports_requests_that_did_not_finish",
        "integrations/fastdeploy/device_cache.py",
        """\
                if record.finished:
                    self.reports.finished(record)
""",
        """\
                self.reports.finished(record)
""",
        "an index is sent the blocks of preempted requests",
        (f"{HERE}/test_indexes.py::test_a_request_that_is_preempted_reports_nothing",),
    ),
    Mutation(
        "fastdeploy_ranks_share_their_part_of_a_slot",
        "integrations/fastdeploy/lower_tiers.py",
        """\
                self.block_bytes += one.block_bytes
""",
        """\
                self.block_bytes = one.block_bytes
""",
        "from the third rank on, ranks overwrite each other's bytes in host slots",
        (f"{HERE}/test_scheduler.py::test_tensors_of_every_kind",),
    ),
    Mutation(
        "fastdeploy_pool_counts_stale_returns",
        "integrations/fastdeploy/requests.py",
        """\
            self._earlier.setdefault(block, set()).add(request)
""",
        """\
            pass
""",
        "a request of before a reset cannot return its blocks",
        (f"{BEHAVIOURS}::test_blocks_of_before_a_reset_are_returned_without_effect",),
    ),
    Mutation(
        "tier_counts_the_jobs_of_others_as_failures",
        "tier_cache/storage_moves.py",
        """\
        self._counters.failed_saves += len(result.keys) - len(saved)
""",
        """\
        self._counters.failed_saves += len(blocks) - len(saved)
""",
        "writes of another caller of the storage tier make the count of failed saves negative",
        (f"{HERE}/test_threads.py::test_writes_of_others_leave_the_counters_of_the_tiers_right",),
    ),
    Mutation(
        "fastdeploy_match_waits_on_through_a_reset",
        "integrations/fastdeploy/lower_tiers.py",
        """\
            if not waits or late or interrupted():
""",
        """\
            if not waits or late:
""",
        "an update of the weights waits for a match, and the match for storage",
        (f"{HERE}/test_status.py::test_a_wait_for_storage_ends_when_the_status_is_normal_no_more",),
    ),
    Mutation(
        "fastdeploy_host_eviction_takes_all",
        "integrations/fastdeploy/lower_tiers.py",
        """\
            found = self.tiers.prepare_store(keys, parents)
""",
        """\
            self.tiers.reset()
            found = self.tiers.prepare_store(keys, parents)
""",
        "an eviction from the device empties the host",
        (f"{HERE}/test_status.py::test_an_eviction_from_the_host_stops_when_there_is_enough",),
    ),
    Mutation(
        "fastdeploy_match_does_not_look_at_the_weights",
        "integrations/fastdeploy/engine_tiers.py",
        """\
        if version != self.settings.config.cache.namespace:
""",
        """\
        if False:
""",
        "KV of earlier weights is served after a pause, a reset and new weights",
        (
            f"{HERE}/test_weights.py::test_blocks_of_earlier_weights_are_not_found_in_fastdeploys_order",
        ),
    ),
)
