"""Planted bugs of calls with wrong arguments, and at the wrong time: `TierCache`, `StorageTier`,
`CopyWorker`. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/tier_cache/test_bad_calls.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "tier_look_up_of_anything",
        "tier_cache/cache.py",
        "        if type(key) is not bytes or not key:\n            key = checked_key(key)\n",
        "",
        "a key that is no bytes is a miss, or an error from deep inside the store",
        (TESTS + "test_a_key_that_is_none",),
    ),
    Mutation(
        "tier_parents_are_not_checked",
        "tier_cache/checks.py",
        "        if not isinstance(parent, bytes | None):\n",
        "        if False:\n",
        "a store with a wrong parent evicts blocks that no report names, and takes slots",
        (TESTS + "test_parents_that_are_none",),
    ),
    Mutation(
        "tier_reset_by_a_text_deletes_the_store",
        "tier_cache/cache.py",
        '        storage = checked_flag("storage", storage)\n',
        "",
        'reset(storage="no") deletes every stored object',
        (TESTS + "test_flags_that_are_none",),
    ),
    Mutation(
        "tier_failed_keys_counted_twice",
        "tier_cache/cache.py",
        "0 if success else len(set(keys))",
        "0 if success else len(keys)",
        "failed stores are counted more than once",
        (TESTS + "test_a_key_that_is_completed_twice_in_one_call_is_counted_once",),
    ),
    Mutation(
        "tier_copies_into_unmapped_memory",
        "tier_cache/slots.py",
        "        return self._view[:]\n",
        "        return memoryview(b'')\n",
        "a copy after the shutdown of the cache writes to unmapped memory and ends the process",
        (
            TESTS
            + "test_a_cache_that_is_shut_down_before_its_worker_keeps_the_memory_of_copies[True]",
        ),
    ),
    Mutation(
        "tier_views_of_closed_memory",
        "tier_cache/slots.py",
        '        if self._closed:\n            raise CacheClosed("the memory of the host slots is '
        'closed")\n        if not 0',
        "        if not 0",
        "a slot of a closed cache is an empty view",
        (TESTS + "test_calls_after_a_shutdown_with_copies_in_flight",),
    ),
    Mutation(
        "worker_waits_for_the_letters_of_a_name",
        "tier_cache/copies.py",
        "        if isinstance(jobs, str | bytes) or not isinstance(jobs, Iterable):\n",
        "        if not isinstance(jobs, Iterable):\n",
        "a wait for a copy ends at once, and its blocks are used while it runs",
        (TESTS + "test_jobs_that_are_no_collection_of_names",),
    ),
    Mutation(
        "worker_waits_until_no_time",
        "tier_cache/checks.py",
        "    if not math.isfinite(seconds):\n",
        "    if False:\n",
        "a limit that is no number is a wait without end, or none",
        (TESTS + "test_limits_that_are_no_times",),
    ),
    Mutation(
        "storage_job_is_cancelled_by_its_caller",
        "tier_cache/storage.py",
        "        self.done.set_running_or_notify_cancel()  # the caller cannot cancel it\n",
        "",
        "a caller that cancels its future breaks the end of the job in the store's thread",
        (TESTS + "test_lists_of_a_job_may_be_changed_after_the_call",),
    ),
    Mutation(
        "tier_cache_of_any_config",
        "tier_cache/cache.py",
        "self.config = config = checked_config(config)",
        "self.config = config",
        "a cache with settings out of range fails at a later call",
        (TESTS + "test_a_cache_checks_its_config_and_its_parts",),
    ),
    Mutation(
        "tier_searches_all_held_keys_for_each_victim",
        "tier_cache/slots.py",
        "            self._ahead = min(2 * self._ahead, self.tier.capacity)\n",
        "",
        "a step that looks many stored keys up takes seconds",
        (TESTS + "test_a_step_of_many_stored_keys_searches_seldom_for_victims",),
    ),
    Mutation(
        "tier_evicts_a_planned_victim_that_is_held",
        "tier_cache/slots.py",
        " or not last or last in self.held:",
        " or not last:",
        "a key that was answered HIT is evicted in the same step",
        (TESTS + "test_victims_that_are_found_together_are_those_that_are_found_one_by_one",),
    ),
    Mutation(
        "tier_evicts_in_the_order_of_before_a_touch",
        "tier_cache/slots.py",
        "        self._touches += 1\n",
        "",
        "a key that was used a moment ago is evicted before older ones",
        (TESTS + "test_victims_that_are_found_together_are_those_that_are_found_one_by_one",),
    ),
)
