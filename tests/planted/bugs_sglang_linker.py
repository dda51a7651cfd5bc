"""Planted bugs of SGLang's linker. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/integrations/test_sglang_linker.py::"
MOVES = "integrations/sglang/pages.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "linker_counts_a_page_on_its_way",
        MOVES,
        "            found += not waits\n",
        "            found += 1\n",
        "a request waits for a load that SGLang has begun before the page is verified",
        (TESTS + "test_a_look_up_does_not_wait_longer_than_it_may",),
    ),
    Mutation(
        "linker_waits_for_each_request",
        MOVES,
        "                self._wait_left_s = max(0.0, until - now)\n",
        "",
        "a slow store stops SGLang's scheduler for each of a hundred waiting requests",
        (TESTS + "test_all_look_ups_of_a_step_share_its_wait",),
    ),
    Mutation(
        "linker_lets_go_of_a_page_before_its_load",
        MOVES,
        "        self._queued[request] = _Load(keys, pages, slots)\n",
        "        self._queued[request] = _Load(keys, pages, slots)\n"
        "        self._tiers.complete_load(keys)\n",
        "the slot of a load is given to another page, whose bytes the request gets",
        (TESTS + "test_pages_of_a_load_are_not_evicted_before_its_end",),
    ),
    Mutation(
        "linker_keeps_the_pages_of_a_cancelled_load",
        MOVES,
        "        if load is not None:\n            self._tiers.complete_load(load.keys)\n",
        "        if load is not None:\n            pass\n",
        "a host slot is lost with each cancelled request",
        (TESTS + "test_a_cancelled_load_copies_nothing_and_lets_go_of_its_pages",),
    ),
    Mutation(
        "linker_reports_a_failed_copy_as_loaded",
        MOVES,
        "        return batch.ok and not failed\n",
        "        return True\n",
        "SGLang computes with pages that never came",
        (TESTS + "test_a_copy_that_fails_is_a_failed_load_and_no_store",),
    ),
    Mutation(
        "linker_reports_a_part_as_a_whole_store",
        MOVES,
        "        store.whole = store.whole and not found.refused\n",
        "",
        "SGLang never offers again the pages that had no slot",
        (TESTS + "test_more_pages_than_host_slots_are_stored_in_part_without_storage",),
    ),
    Mutation(
        "linker_takes_scattered_tokens_for_a_page",
        "integrations/sglang/pages.py",
        "        whole = (tokens == starts[:, None] + np.arange(self.page_tokens)).all(axis=1)\n",
        "        whole = np.ones(count, np.bool_)\n",
        "the bytes of other tokens are stored under a page's hash",
        (TESTS + "test_pages_of_a_device_pool",),
    ),
)
