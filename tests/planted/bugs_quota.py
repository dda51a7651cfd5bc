"""Defects of quotas, hints, pins and clears by salt."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/cache/test_quotas.py::"
TENANTS = "tests/cache/test_tenants.py::"
CLEAR = "tests/cache/test_clear_salt.py::"
SHARES = "tests/storage/test_store_shares.py::"
STORED = "tests/cache/test_storage_quotas.py::"
TENANT = "tests/cache/test_erase_tenant.py::"
ORDER = "tests/cpu_evictor/test_share_order.py::"
BUGS = (
    Mutation(
        "salt_does_not_reach_the_eviction",
        "prefix_index/grants.py",
        "            path.salt = number = salt_id(scope.salt)\n",
        "            number = salt_id(scope.salt)\n",
        "all requests count as one tenant, and a flood evicts the others' blocks",
        (TESTS + "test_a_salt_above_its_quota_makes_only_its_own_blocks_leave",),
    ),
    Mutation(
        "clear_loses_the_evictions_of_a_salt",
        "prefix_index/policy.py",
        "        self.keep_counts(tree)\n",
        "        pass\n",
        "evictions because of a quota go down when the cache is cleared",
        (TENANTS + "test_evictions_of_a_quota_are_those_of_its_salt",),
    ),
    Mutation(
        "salts_with_counters_are_not_bounded",
        "quotas.py",
        "        if number not in self.rows and self._unnamed < UNNAMED_SALTS:\n",
        "        if number not in self.rows:\n",
        "a client that draws salts fills the memory",
        (TENANTS + "test_at_most_1000_salts_without_a_quota_have_an_entry",),
    ),
    Mutation(
        "host_ignores_quotas",
        "cpu_evictor/slots.py",
        "        if over <= 0 or not self.limited:\n",
        "        if True:\n",
        "offloaded blocks of a salt beyond its quota evict those of another salt",
        (TESTS + "test_a_quota_is_kept_in_the_host_tier",),
    ),
    Mutation(
        "hints_are_not_applied",
        "prefix_index/policy.py",
        "        tree.hint(path, priority, expiry)\n",
        "",
        "blocks of a low priority stay as long as others",
        (TESTS + "test_blocks_of_a_lower_priority_leave_first",),
    ),
    Mutation(
        "pins_are_not_bounded",
        "prefix_index/pins.py",
        "lease.tree.pin_blocks(path, blocks, self.limit)",
        "lease.tree.pin_blocks(path, blocks, 1 << 30)",
        "pins take the whole device",
        (TESTS + "test_pinned_blocks_stay_up_to_the_share",),
    ),
    Mutation(
        "clear_keeps_pins",
        "prefix_index/core.py",
        "        actions = self.pins.end_all()\n",
        "        actions = list[Action]()\n",
        "device blocks of before a clear are never free again",
        (TESTS + "test_a_clear_ends_pins",),
    ),
    Mutation(
        "clear_of_a_salt_reports_its_first_part_only",
        "prefix_index/core.py",
        "actions = [] if tree.retired else self.announcements.removed(hashes, Reason.CLEAR)",
        "actions = self.announcements.removed(hashes if not count else b'', Reason.CLEAR)",
        "an index sends requests for the blocks of a cleared salt",
        (CLEAR + "test_requests_of_the_salt_during_its_clear_are_cached_anew",),
    ),
    Mutation(
        "eviction_loses_blocks_of_a_clear_in_progress",
        "prefix_index/index.py",
        "    index.pool.give(freed)\n    return Eviction(",
        "    return Eviction(",
        "device blocks are never free again",
        (CLEAR + "test_blocks_of_a_clear_in_progress_are_taken_without_a_copy",),
    ),
    Mutation(
        "clear_of_a_salt_leaves_the_host",
        "cpu_evictor/slots.py",
        "    for block in found:\n        tier.drop(block)\n",
        "",
        "blocks of a tenant that was forgotten are still in host memory",
        (TESTS + "test_a_clear_of_one_salt_forgets_it_in_device_and_host",),
    ),
    Mutation(
        "open_lease_brings_a_salt_back",
        "prefix_index/core.py",
        "                path.forgotten = True\n",
        "                pass\n",
        "a request from before the clear of its salt makes its blocks hits again",
        (TESTS + "test_a_lease_of_before_a_clear_of_its_salt_caches_nothing",),
    ),
    Mutation(
        "quota_evicts_beyond_its_excess",
        "cpu_evictor/slots.py",
        "            follows = len(chosen) < end or passed.get(block.parent) == inf\n",
        "            follows = True\n",
        "a salt at its quota loses a block before other salts' blocks of a lower priority",
        (ORDER + "test_a_quota_evicts_no_more_than_the_blocks_beyond_it",),
    ),
    Mutation(
        "pinned_host_blocks_leave",
        "cpu_evictor/slots.py",
        "            or shares.is_pinned(block.hash)\n",
        "",
        "pinned blocks are evicted from the host tier",
        (ORDER + "test_host_blocks_leave_in_the_order_of_the_model",),
    ),
    Mutation(
        "host_pins_are_not_bounded",
        "cpu_evictor/slots.py",
        "        if self.pinned + fresh > self._pin_limit:\n",
        "        if False:\n",
        "pins take the whole host tier",
        (ORDER + "test_a_path_beyond_the_share_of_pins_is_refused_as_a_whole",),
    ),
    Mutation(
        "expired_host_blocks_stay",
        "cpu_evictor/slots.py",
        "        yield from ((block, inf) for block in self._expired())\n",
        "",
        "host blocks whose time to live is over stay as long as others",
        (ORDER + "test_host_blocks_whose_time_is_over_leave_before_a_lower_priority",),
    ),
    Mutation(
        "store_ignores_quotas",
        "storage/catalog.py",
        "        for key in self._beyond(keys):\n",
        "        for key in ():\n",
        "a flood of one salt evicts the objects of the others from the store",
        (STORED + "test_a_flood_of_one_salt_leaves_the_blocks_of_another_in_the_store",),
    ),
    Mutation(
        "store_quota_evicts_beyond_its_excess",
        "storage/shares.py",
        "            beyond = min(over - len(found), len(order) - int(self._quota(salt)))\n",
        "            beyond = min(over - len(found), len(order))\n",
        "a salt above its quota loses objects of the store that are within it",
        (SHARES + "test_many_small_stores_follow_the_model",),
    ),
    Mutation(
        "refused_objects_count_as_evicted",
        "storage/catalog.py",
        "            if key in batch and key not in there:\n",
        "            if False:\n",
        "indexes are sent the removal of objects that were never stored",
        (SHARES + "test_a_salt_above_its_quota_loses_its_own_keys_and_no_others",),
    ),
    Mutation(
        "evicted_objects_of_a_batch_count_as_stored",
        "storage/catalog.py",
        "                beyond.add(key)\n",
        "                pass\n",
        "indexes are sent objects that a quota has evicted",
        (SHARES + "test_many_small_stores_follow_the_model",),
    ),
    Mutation(
        "salts_do_not_reach_the_store",
        "cpu_evictor/requests.py",
        "        salts = tuple([block.salt for block in blocks])\n",
        "        salts = ()\n",
        "a quota of the store is accepted and bounds nothing",
        (STORED + "test_a_flood_of_one_salt_leaves_the_blocks_of_another_in_the_store",),
    ),
    Mutation(
        "salts_of_files_are_not_read_back",
        "storage/backends/slab_medium.py",
        "catalog.admit([key], {key: salt})",
        "catalog.admit([key])",
        "a quota of the store begins from zero with each start",
        (STORED + "test_a_file_store_that_is_opened_again_has_the_salts",),
    ),
    Mutation(
        "clear_of_a_salt_leaves_the_store",
        "storage/writer.py",
        "                unknown = await store.forget(salt)\n",
        "                unknown = 0\n",
        "a tenant that was cleared with the store is hit in the store",
        (TENANT + "test_a_tenant_is_not_hit_in_any_tier_afterwards_and_others_are",),
    ),
    Mutation(
        "failed_clear_of_a_salt_leaves_its_entries",
        "storage/clears.py",
        """\
        except BaseException:
            self._await_clear()
            raise
""",
        """\
        except BaseException:
            raise
""",
        "after a disk that refused, a second clear of the salt returns, and the next process finds "
        "its objects",
        (TENANT + "test_after_a_failure_the_whole_store_is_cleared",),
    ),
    Mutation(
        "erasure_leaves_the_table",
        "storage/backends/slab_files.py",
        "            os.pwrite(self._table, bytes((1 + len(more)) * size), PAGE + slot * size)\n",
        "",
        "tokens of cleared blocks stay in the table of a store that was erased",
        (TENANT + "test_bytes_of_an_erased_tenant_are_not_in_the_files",),
    ),
    Mutation(
        "changed_quota_waits_for_the_next_object_of_the_salt",
        "quotas.py",
        "            self.changed(number)\n",
        "            pass\n",
        "a quota that is lowered while the cache runs makes no object leave",
        (SHARES + "test_many_small_stores_follow_the_model",),
    ),
    Mutation(
        "full_disk_ignores_quotas",
        "storage/catalog.py",
        "        key = self.shares.first_beyond(busy)\n",
        "        key = None\n",
        "on a full disk a flood of one salt evicts the objects of the others",
        (SHARES + "test_many_small_stores_follow_the_model",),
    ),
)
