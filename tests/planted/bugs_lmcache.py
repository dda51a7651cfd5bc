"""Planted bugs of LMCache's adapter. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

WORKER = "tests/integrations/lmcache/test_worker.py::"
PARTS = "tests/integrations/lmcache/test_parts.py::"
TIER = "tests/tier_cache/test_storage_tier.py::"
FILES = "tests/storage/test_file_store.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "lmcache_locked_object_is_evicted",
        "integrations/lmcache/catalog.py",
        "            if key not in self.locks and key not in keep:\n",
        "            if key not in keep:\n",
        "an object that a look-up has locked is evicted before LMCache loads it",
        (WORKER + "test_the_store_evicts_by_use_and_never_a_locked_object",),
    ),
    Mutation(
        "lmcache_locked_object_is_deleted",
        "integrations/lmcache/object_store.py",
        "key for key in dict.fromkeys(keys) if key not in self.catalog.locks and key in self",
        "key for key in dict.fromkeys(keys) if key in self",
        "LMCache's eviction deletes an object that a look-up has locked",
        (WORKER + "test_delete_leaves_locked_objects",),
    ),
    Mutation(
        "lmcache_layout_is_not_in_the_identity",
        "integrations/lmcache/object_store.py",
        "        (LAYOUT, shape.layout.encode()),\n",
        "",
        "an object of one dtype has the pages of the same key with another dtype",
        (PARTS + "test_layouts_are_part_of_the_digest",),
    ),
    Mutation(
        "lmcache_late_page_is_copied_out",
        "integrations/lmcache/object_store.py",
        "            if good and not lane.save and not transfer.ended:\n",
        "            if good and not lane.save:\n",
        "a read that ends after its task has failed overwrites memory that LMCache has back",
        (WORKER + "test_a_load_that_hangs_ends_in_time_and_leaves_the_memory_alone",),
    ),
    Mutation(
        "lmcache_torn_line_takes_the_next_one",
        "integrations/lmcache/catalog.py",
        'begin, self._torn = b"\\n" if self._torn else b"", True',
        'begin, self._torn = b"", True',
        "after a write that failed half-way the next key is lost at a restart",
        (PARTS + "test_a_line_after_a_failed_write_is_whole",),
    ),
    Mutation(
        "lmcache_beginning_of_a_prefix_is_evicted_first",
        "integrations/lmcache/catalog.py",
        "key for key in reversed(keys) if key in self._unwritten",
        "key for key in keys if key in self._unwritten",
        "after a restart the beginning of a prefix is evicted, and its other chunks are useless",
        (WORKER + "test_after_a_restart_the_end_of_a_prefix_is_evicted_first",),
    ),
    Mutation(
        "removed_objects_return_after_a_restart",
        "tier_cache/storage.py",
        "            self.call(self._loop.remove, names)\n",
        "            pass\n",
        "objects that were removed are found again by the next process",
        (TIER + "test_removed_objects_are_gone_at_once_and_after_a_restart",),
    ),
    Mutation(
        "store_group_read_mixes_outcomes_up",
        "storage/backends/slab_medium.py",
        "                outcomes[i] = await self._settled(keys[i], one, outcome, generation)\n",
        "                outcomes[i] = await self._settled(keys[-1], one, outcome, generation)\n",
        "a damaged object is given up under the key of another object of its group",
        (f"{FILES}::test_a_damaged_object_fails_alone_in_its_group",),
    ),
)
