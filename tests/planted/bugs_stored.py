"""Planted bugs of the file store's announcements after a restart, and of its tasks. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

TASKS = "tests/storage/test_store_tasks.py"
PAGES = "tests/storage/test_report_pages.py"
RESTART = "tests/storage/test_restart_announces.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "growth_swallows_cancellation",
        "storage/backends/slab_steps.py",
        "        outcome = await asyncio.wrap_future(call)\n",
        "        outcome = await wait_uncancelled(asyncio.wrap_future(call))\n",
        "a loop that ends waits for a disk that hangs, because the store was growing",
        (f"{TASKS}::test_a_loop_ends_although_a_step_of_the_store_hangs",),
    ),
    Mutation(
        "advance_swallows_cancellation",
        "storage/backends/slab_steps.py",
        "            await asyncio.wrap_future(self._threads.submit(lambda: "
        "self._files.advance(number)))\n",
        "            await wait_uncancelled(asyncio.wrap_future(self._threads.submit(lambda: "
        "self._files.advance(number))))\n",
        "a loop that ends waits for a disk that hangs, because the store was being cleared",
        (f"{TASKS}::test_a_loop_ends_although_a_step_of_the_store_hangs",),
    ),
    Mutation(
        "lock_tried_without_end",
        "storage/backends/slab_lock.py",
        "    for _ in range(ATTEMPTS):\n",
        "    while ATTEMPTS:\n",
        "opening a store whose lock is replaced again and again keeps a thread busy without end",
        (f"{TASKS}::test_a_lock_that_is_replaced_again_and_again_is_an_error",),
    ),
    Mutation(
        "flush_does_not_wait_for_the_report",
        "storage/reporter.py",
        "return self.pages.active or self.paths.active or starting",
        "return self.paths.active or starting",
        "wait_flushed(at_rest=False) right after opening returns before the store's blocks were "
        "reported",
        (f"{PAGES}::test_a_flush_waits_for_every_page_of_the_report_at_the_start",),
    ),
    Mutation(
        "salted_tokens_on_disk",
        "prefix_index/lineages.py",
        "        return scope if scope.salt is None and self._root_of(scope) == root else None\n",
        "        return scope if self._root_of(scope) == root else None\n",
        "tokens of requests under a salt are written to disk",
        (f"{RESTART}::test_nothing_under_a_salt_is_kept_or_announced",),
    ),
    Mutation(
        "stored_children_before_parents",
        "storage/backends/slab_paths.py",
        "            slots = self._chain[stop:][::-1]\n",
        "            slots = self._chain[stop:]\n",
        "stored blocks are named before their parents: beyond the bound of those that wait they "
        "stay unannounced",
        (f"{RESTART}::test_stored_blocks_are_announced_after_a_restart",),
    ),
    Mutation(
        "every_top_is_a_root",
        "storage/reports.py",
        "frozenset(part.parent for part in parts if root_of(part.scope) == part.parent)",
        "frozenset(part.parent for part in parts if root_of(part.scope))",
        "stored blocks that no request can find are announced: of another namespace, or below an "
        "evicted block",
        ("tests/storage/test_reports.py::test_a_message_has_the_roots_that_requests_have_now",),
    ),
    Mutation(
        "late_parent_places_nothing",
        "flush_notifier/unnamed.py",
        "                self.placeable.append(block_hash)\n",
        "                pass\n",
        "stored blocks whose parent comes after the start stay unannounced",
        (f"{RESTART}::test_a_block_whose_parent_is_gone_waits_for_it",),
    ),
    Mutation(
        "lineage_not_compared_with_the_key",
        "storage/backends/slab_lineage.py",
        "    return found if found.block_hash() == key else None\n",
        "    return found\n",
        "a stored block is announced with another block's tokens",
        (f"{RESTART}::test_damaged_lineages_cost_the_announcement_of_their_paths_only",),
    ),
    Mutation(
        "flush_does_not_wait_for_the_paths",
        "storage/reporter.py",
        "return self.pages.active or self.paths.active or starting",
        "return self.pages.active or starting",
        "wait_flushed(at_rest=False) right after opening returns before the paths of stored "
        "blocks were sent",
        (f"{RESTART}::test_stored_blocks_are_announced_after_a_restart",),
    ),
    Mutation(
        "new_notifier_without_paths",
        "storage/writer.py",
        "            self.reporter.paths.restart()\n            self.reporter.report_all()\n",
        "            self.reporter.report_all()\n",
        "after a restart of the notifier the rest of the store stays unannounced",
        (f"{RESTART}::test_the_paths_are_sent_again_after_a_failure",),
    ),
    Mutation(
        "paths_read_to_the_end_at_a_close",
        "system.py",
        "            self.store.end_paths()\n",
        "            self.store.probe([])\n",
        "a cache that is closed right after it was opened reads all of a large store's table first",
        (f"{RESTART}::test_a_cache_that_closes_does_not_read_the_rest",),
    ),
    Mutation(
        "paths_from_a_rank_are_not_checked",
        "data_plane/ranks/store.py",
        "        return [part for part in answers[0].paths if proved(part)]\n",
        "        return list(answers[0].paths)\n",
        "a rank can have blocks announced with tokens that are not theirs",
        (
            "tests/ranks/test_rank_restart_announces.py::test_paths_of_a_rank_that_are_not_proved_are_left_out",
        ),
    ),
    Mutation(
        "stored_blocks_of_one_rank_announced",
        "flush_notifier/unnamed.py",
        "            if block_hash in unnamed.tiers and size == ledger.block_bytes:\n",
        "            if block_hash not in tree.blocks and size == ledger.block_bytes:\n",
        "blocks on no tier get entries because a store has kept the inputs of their hashes",
        (
            "tests/storage/test_restart_announces.py::test_names_of_blocks_that_are_nowhere_are_ignored",
        ),
    ),
    Mutation(
        "lineages_of_overlapping_batches",
        "storage/backends/slab_lineage.py",
        "                if self._by_key.get(key) is entry:\n"
        "                    del self._by_key[key]\n",
        "                del self._by_key[key]\n",
        "two batches with a key in common, in a small store: blocks that the second wrote and "
        "evicted are not reported",
        (
            "tests/storage/test_overlapping_batches.py::test_a_key_that_does_not_fit_may_be_in_several_batches",
        ),
    ),
)
