"""Planted bugs of the SGLang adapter. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TESTS = "tests/integrations/test_sglang.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "sglang_page_that_failed_is_served",
        "integrations/sglang/pages.py",
        "good = [i for i, found in enumerate(result.ok) if found]",
        "good = list(range(len(result.ok)))",
        "a page with flipped bits enters the host pool, and other tokens come out",
        (TESTS + "test_a_page_that_cannot_be_read_leaves_its_memory_unchanged",),
    ),
    Mutation(
        "sglang_rank_is_no_part_of_the_identity",
        "integrations/sglang/settings.py",
        "        dimensions.append((config.tp_rank, config.tp_size))\n",
        "        pass\n",
        "a rank reads the heads of another rank",
        (TESTS + "test_ranks_are_distinct_and_replicated_pages_have_one_writer",),
    ),
    Mutation(
        "sglang_window_of_one_page",
        "integrations/sglang/linker.py",
        "if run >= min(pool.trailing, i + 1):",
        "if run >= 1:",
        "a prefix is restored whose sliding window is not whole",
        (TESTS + "test_prefixes_are_those_that_every_pool_allows",),
    ),
    Mutation(
        "sglang_call_without_a_deadline",
        "integrations/sglang/pages.py",
        "        try:\n            result = batch.done.result(max(0.0, until - time.monotonic()))\n",
        "        try:\n            result = batch.done.result()\n",
        "a store that hangs holds SGLang's prefetch thread, and with it every rank",
        (TESTS + "test_a_call_ends_at_its_deadline_and_its_memory_is_the_engine_s_again",),
    ),
)
