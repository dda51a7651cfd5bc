"""Planted bugs of look-ups and of requests that wait for blocks. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

GRANTS = "tests/prefix_index/test_grants.py"
IN_TIME = "tests/cache/test_hints_in_time.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "lookup_pins_the_prompt",
        "lookup.py",
        "    run, states = index.tree.peek(path, limit)\n",
        "    run, states = index.tree.pin(path, limit)\n",
        "a prompt that is looked up holds its blocks, which can never be evicted any more",
        ("tests/cache/test_lookup.py::test_a_lookup_takes_and_touches_nothing",),
    ),
    Mutation(
        "lookup_counts_what_storage_cannot_give",
        "lookup.py",
        "        if state & DEVICE:\n            break  # on its way",
        "        if state & DEVICE and not keys:\n            break  # on its way",
        "a look-up counts stored blocks below a block that is leaving the device as hits",
        ("tests/prefix_index/test_lookup.py::test_nothing_below_a_leaving_block_is_a_hit",),
    ),
    Mutation(
        "lookup_asks_a_store_that_fails",
        "storage/checked_inventory.py",
        "if self._clears.closed or calls.attempts.reads.paused or calls.overdue():",
        "if self._clears.closed:",
        "blocks of a store that does not answer count as hits",
        ("tests/cache/test_lookup.py::test_blocks_of_a_store_that_fails_are_not_hits",),
    ),
    Mutation(
        "small_requests_overtake_those_that_wait_for_room",
        "prefix_index/requests.py",
        "        if claims <= admission.spare(heads) and self._fits(message):\n",
        "        if self._fits(message):\n",
        "a large request that waits for space never gets it: small ones take every block before it",
        ("tests/cache/test_wait_for_room.py::test_requests_are_admitted_in_order",),
    ),
    Mutation(
        "released_blocks_wake_nobody",
        "prefix_index/admission.py",
        "        return self.proceed_later() if waits else []\n",
        "        return []\n",
        "a request that waits for space gets it only when something else happens",
        ("tests/prefix_index/test_space.py::test_the_queue_equals_its_model",),
    ),
    Mutation(
        "long_request_leaves_the_queue_blocked",
        "prefix_index/admission.py",
        "        del self.space.retried[lease]\n        return",
        "        return",
        "after a long request that had waited for space no other one is admitted",
        ("tests/cache/test_wait_for_room.py::test_long_requests_wait_too",),
    ),
    Mutation(
        "own_cached_blocks_count_twice",
        "prefix_index/index.py",
        "        run = self.tree.referenced_run(path, min(self.match_limit(path), self.part))\n",
        "        run = self.tree.peek(path, min(self.match_limit(path), self.part))[0]\n",
        "a request that waits counts its cached blocks as hits and as blocks to evict: it is matched "
        "again and again without space for it",
        ("tests/prefix_index/test_space.py::test_own_cached_blocks_are_not_free",),
    ),
    Mutation(
        "too_large_requests_wait",
        "prefix_index/admission.py",
        "        if claim > total:\n",
        "        if claim > total and not pinned:\n",
        "a request that can never fit waits until its deadline, and all others behind it",
        ("tests/prefix_index/test_space.py::test_not_now_and_never_are_different_errors",),
    ),
    Mutation(
        "request_that_lost_its_blocks_is_refused",
        "prefix_index/admission.py",
        "        if self._patient:\n",
        "        if self._patient and not self.waiting:\n",
        "a request that was to wait for space is refused when the evictions it waits for come short",
        ("tests/prefix_index/test_space.py::test_evictions_that_come_short_are_no_refusal",),
    ),
    Mutation(
        "deadline_of_room_is_missed",
        "prefix_index/requests.py",
        "        held = self._admission.space.expire(lease, ticket)\n",
        "        held = None\n",
        "a request that waits for space ends at its deadline for its caller, and stays in the queue",
        ("tests/prefix_index/test_space.py::test_the_queue_equals_its_model",),
    ),
    Mutation(
        "late_load_reports_the_tokens_after_a_truncate",
        "prefix_index/tables.py",
        "        self._keep_paths_of_loads(path)\n",
        "",
        "a load that ends after its lease was truncated fails the index, or announces its blocks by "
        "other tokens",
        (
            "tests/prefix_index/test_loads.py::test_a_late_load_is_announced_by_the_tokens_that_it_was_loaded_for",
        ),
    ),
    Mutation(
        "chunk_forgets_the_cached_blocks",
        "prefix_index/index.py",
        "        tokens = cached * self.block_size + chunk\n",
        "        tokens = max(cached * self.block_size, chunk)\n",
        "a chunk of a prompt with cached blocks has no block to compute into",
        ("tests/cache/test_chunked.py::test_the_chunk_begins_after_the_cached_tokens",),
    ),
    Mutation(
        "tokens_without_blocks_are_committed",
        "prefix_index/commits.py",
        "        if computed > covered:\n",
        "        if computed > covered + self._index.part * self._index.block_size:\n",
        "a commit beyond the chunk ends the lease in place of being refused",
        ("tests/cache/test_chunked.py::test_tokens_without_blocks_cannot_be_committed",),
    ),
    Mutation(
        "chunk_takes_what_the_store_does_not_have",
        "calls.py",
        "            stored = await look.count_stored(self, path, scope, media)\n",
        "            stored = None\n",
        "with a store, the first chunk of a prompt takes the device blocks of the whole prompt",
        ("tests/cache/test_chunked.py::test_a_prompt_is_computed_in_chunks",),
    ),
    Mutation(
        "prefetched_blocks_are_not_looked_up",
        "lookup.py",
        "STORAGE if block is None or block.arriving else HOST",
        "STORAGE",
        "a lookup does not count what a prefetch has brought, and a first chunk does not take it",
        (
            "tests/cache/test_prefetch.py::test_a_lookup_and_a_chunked_request_find_prefetched_blocks",
        ),
    ),
    Mutation(
        "pin_ends_by_the_loops_clock",
        "prefix_index/pins.py",
        "        if pin.expiry - self._index.policy.now() > EARLY:\n",
        "        if False:\n",
        "the clock of a replay does not count for the time of a pin",
        (f"{IN_TIME}::test_a_pin_ends_when_its_time_is_over_on_the_clocks_of_cache_and_loop",),
    ),
    Mutation(
        "a_refused_request_keeps_what_leaves",
        "prefix_index/grants.py",
        "chunk=message.chunk_tokens, used=certain\n",
        "chunk=message.chunk_tokens\n",
        "requests that are refused and try again keep each other's victims, and none gets its blocks",
        (f"{GRANTS}::test_refused_requests_that_try_again_in_turn_are_all_granted",),
    ),
    Mutation(
        "a_request_that_waits_loses_what_it_hits",
        "prefix_index/grants.py",
        "        elif admission.waiting.get(message.lease) is waiter:\n",
        "        elif False:\n",
        "blocks that a waiting request has hit leave the device before it has the others",
        (f"{GRANTS}::test_a_granted_or_waiting_request_keeps_what_was_leaving",),
    ),
    Mutation(
        "a_refused_request_sends_loads",
        "prefix_index/grants.py",
        "placed=False) if wait else []\n",
        "placed=False)\n",
        "each try of a request that is refused sends loads and cancels them",
        (f"{GRANTS}::test_a_refused_request_counts_no_hit_and_sends_no_load",),
    ),
    Mutation(
        "numa_node_is_ignored",
        "data_plane/local.py",
        "        numa_node=config.host.numa_node,\n",
        "",
        "the setting of the NUMA node has no effect",
        ("tests/device/test_numa.py::test_a_cache_binds_its_arena",),
    ),
)
