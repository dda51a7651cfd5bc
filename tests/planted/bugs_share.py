"""Planted bugs of forks of leases, and of sleep and wake."""

from __future__ import annotations

from tests.planted.mutation import Mutation

FORK = "tests/cache/test_fork_lease.py::"
SLEEP = "tests/cache/test_sleep.py::"
WALKS = "tests/prefix_index/test_index_machine.py::test_long_walks_through_every_order"

BUGS = (
    Mutation(
        "fork_shares_a_last_block",
        "prefix_index/forks.py",
        "            fork.path.assign(fork.path.num_blocks, [block])\n",
        "            fork.path.assign(fork.path.num_blocks, [tail_of(lease.path)])\n"
        "            self._index.pool.share([tail_of(lease.path)])\n"
        "            self._index.pool.give([block])\n",
        "a branch overwrites the tokens of another",
        (FORK + "test_full_blocks_are_shared_and_the_last_one_is_copied",),
    ),
    Mutation(
        "owner_of_a_shared_block_is_not_counted",
        "prefix_index/forks.py",
        "        self._index.pool.share(lease.tree.fork(lease.path, path))\n",
        "        lease.tree.fork(lease.path, path)\n",
        "a full block of a fork is given to another request when its parent ends",
        (FORK + "test_a_shared_block_is_free_after_both_leases", WALKS),
    ),
    Mutation(
        "shared_block_is_never_free",
        "prefix_index/pool.py",
        "            elif others == 1:\n                del self._owners[block]\n",
        "            elif others == 1:\n                pass\n",
        "blocks that forks shared are lost",
        (FORK + "test_a_shared_block_is_free_after_both_leases",),
    ),
    Mutation(
        "blocks_of_a_copy_are_not_held",
        "prefix_index/forks.py",
        "        self._index.pool.share((copy.source, *copy.targets))\n",
        "",
        "the block that is being copied is given to another request",
        (WALKS,),
    ),
    Mutation(
        "fork_does_not_wait_for_the_event",
        "forking.py",
        "        await hold.wait_event(event, self.num_tokens, self.num_tokens, at)\n",
        "        pass\n",
        "the last block is copied before the device has computed it",
        (FORK + "test_the_copy_waits_for_the_event_and_a_failed_one_changes_nothing",),
    ),
    Mutation(
        "fork_does_not_join_loads",
        "prefix_index/leases.py",
        "            load.sharers.append(fork)\n",
        "            pass\n",
        "a fork is never told that its loads have ended",
        (FORK + "test_loads_in_flight_are_waited_for_by_both", WALKS),
    ),
    Mutation(
        "truncate_within_a_shared_block",
        "prefix_index/tables.py",
        "            if self._index.pool.is_shared(block):\n",
        "            if False:\n",
        "a lease overwrites tokens of its fork after a truncate",
        (FORK + "test_tokens_in_a_shared_block_are_not_dropped_while_it_is_shared",),
    ),
    Mutation(
        "fork_counts_as_a_request",
        "prefix_index/forks.py",
        "            counted=False,\n",
        "            counted=True,\n",
        "hits of loads are counted once per fork",
        (FORK + "test_loads_in_flight_are_waited_for_by_both",),
    ),
    Mutation(
        "cleared_blocks_of_forks_count_as_free",
        "prefix_index/index.py",
        "max(0, self.returning - self.pool.num_shared) if self.returning else 0",
        "self.returning",
        "a request after a clear takes blocks that a fork has, and PrefixIndex fails",
        (WALKS,),
    ),
    Mutation(
        "failed_copy_of_a_fork_is_not_noticed",
        "prefix_index/forks.py",
        "        if not failed:\n",
        "        if True:\n",
        "a fork computes on bytes that did not arrive",
        (FORK + "test_a_copy_that_fails_changes_nothing",),
    ),
    Mutation(
        "cancelled_fork_keeps_its_leases",
        "lease_hold.py",
        "            for lease in message.leases:\n                self.client.abandon(lease)\n",
        "",
        "leases of a fork whose caller has gone are never ended",
        (FORK + "test_a_cancelled_fork_leaves_nothing",),
    ),
    Mutation(
        "copies_end_before_the_swapper_is_new",
        "prefix_index/core.py",
        '        if name == "gpu_swapper":\n',
        '        if name == "cpu_evictor ":\n',
        "a fork that a restart of the swapper interrupts keeps its blocks",
        (WALKS,),
    ),
    Mutation(
        "sleep_with_an_open_lease",
        "prefix_index/sleeping.py",
        "        if self._is_busy():\n            return [Refusal",
        "        if False:\n            return [Refusal",
        "a lease of a cache that sleeps has device blocks that are gone",
        (SLEEP + "test_an_open_lease_refuses_the_sleep_and_nothing_changes",),
    ),
    Mutation(
        "sleep_leaves_blocks_on_the_device",
        "prefix_index/sleeping.py",
        "        if evicted:\n",
        "        if False:\n",
        "blocks of before the sleep are lost although the host has capacity",
        (SLEEP + "test_level_1_moves_the_device_to_the_host",),
    ),
    Mutation(
        "asleep_cache_admits_requests",
        "prefix_index/requests.py",
        "        if self._held.asleep:\n            return [Refusal(envelope, CacheAsleep())]\n"
        "        if self._held.paused",
        "        if self._held.paused",
        "a request gets device blocks without memory",
        (SLEEP + "test_every_call_that_needs_the_tiers_is_refused",),
    ),
    Mutation(
        "restarted_index_is_awake",
        "wiring.py",
        "            asleep=self.asleep,\n",
        "",
        "an index that restarts during a sleep admits requests",
        (SLEEP + "test_an_index_that_restarts_during_the_sleep_admits_nothing",),
    ),
    Mutation(
        "host_memory_is_kept_asleep",
        "device/arena.py",
        "        self._map.madvise(mmap.MADV_DONTNEED)\n",
        "",
        "level 2 releases no host memory",
        (SLEEP + "test_the_host_arena_gives_its_memory_back",),
    ),
    Mutation(
        "failed_sleep_stays_asleep",
        "sleeping.py",
        "    except BaseException:\n        await uncancelled(_admit(system))\n        raise\n",
        "    except BaseException:\n        raise\n",
        "a sleep that was late leaves a cache that refuses every request",
        (SLEEP + "test_a_sleep_that_is_late_leaves_the_cache_awake",),
    ),
    Mutation(
        "device_is_kept_by_the_cache",
        "cache.py",
        "    del device  # a sleep releases it\n",
        "",
        "an engine frees its tensors, and their memory stays",
        (SLEEP + "test_an_engine_frees_its_tensors_and_gives_others",),
    ),
)
