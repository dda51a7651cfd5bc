"""Caches of models with windows and states: every pass reads what full attention, a window or a
state would need, whatever the tiers did meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import kvactors
from kvactors.errors import LeaseEnded, NoRoom, NotReady, TokensCommitted
from kvactors.groups import STORAGE
from kvactors.native import DEVICE
from kvactors.observe.prometheus import CacheMetrics
from kvactors.prefix_index import work
from tests.support.cache import BLOCK
from tests.support.layers import Model, opened, state, window

TIERS: dict[str, Any] = {
    "host": {"slots": 40},
    "storage": {"backend": "memory", "write_policy": "write_through"},
}

KINDS: dict[str, Any] = {
    "window": [window(60)],
    "state": [state(30)],
    "both": [window(60), state(30)],
    "both, all tiers": [window(22, slots=16), state(9, slots=4)],
}


async def walk(model: Model, seed: int, requests: int = 60) -> int:
    """Conversations with shared prefixes, by passes of any size, with forks, preemptions, drafts
    and requests that are given up. Returns the cached tokens."""
    rng, cache, cached = random.Random(seed), model.cache, 0

    def draw(most: int) -> list[int]:
        return [rng.randrange(50) for _ in range(rng.randrange(most))]

    said = [[*draw(36), 1] for _ in range(3)]
    for number in range(requests):
        tokens, name = list(rng.choice(said)), f"r{number}"
        chunk = rng.choice((None, BLOCK, 6))
        lease = await cache.acquire(name, tokens, chunk_tokens=chunk, wait_for_room=True)
        await model.prefill(lease, tokens, chunk=chunk or 1 << 30)
        cached += lease.cached_tokens
        await model.decode(lease, tokens, draw(9))
        fate = rng.randrange(6)
        if fate == 0 and "state" not in cache.groups:
            await lease.extend(draw(2 * BLOCK))  # a draft that is rejected
            await lease.truncate(len(tokens))
            await model.decode(lease, tokens, draw(6))
        if fate == 1:
            fork, others = await lease.fork(), list(tokens)
            await model.decode(fork, others, [*draw(9), 7])
            await model.decode(lease, tokens, [*draw(9), 8])
            await fork.finish(len(others))
        if fate == 2:
            await lease.preempt(len(tokens))
            lease = await cache.acquire(name, tokens, wait_for_room=True)
            await model.prefill(lease, tokens)
        if fate == 3:
            lease.abandon()
        else:
            await lease.finish(len(tokens))
        if len(tokens) < 60 and rng.random() < 0.6:
            said[rng.randrange(len(said))] = tokens
    return cached


@pytest.mark.parametrize("policy", ["lru", "retain"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_pass_reads_what_its_layers_need(kind, policy):
    for seed in range(3):
        host = {"slots": 10} if "tiers" in kind else {}
        table = {"policy": policy}
        async with opened(KINDS[kind], host=host, device_table=table) as cache:
            assert await walk(Model(cache), seed) > 300


async def guest(model: Model, rng: random.Random, said: list[list[int]], name: str) -> None:
    """A client among others that want the same few blocks: a request that lacks one gives way."""
    for number in range(10):
        at, chunk = rng.randrange(len(said)), rng.choice((None, BLOCK, 6))
        tokens, lacking = list(said[at]), True
        goal = len(tokens) + rng.randrange(9)
        while lacking:
            lease = await model.cache.acquire(
                f"{name}.{number}", tokens, chunk_tokens=chunk, wait_for_room=True
            )
            with suppress(NoRoom):
                await model.prefill(lease, tokens, chunk=chunk or 2 * BLOCK)
                while len(tokens) < goal:
                    await model.decode(lease, tokens, [rng.randrange(50)])
                lacking = False
            await (lease.preempt() if lacking else lease.finish(len(tokens)))
        if len(tokens) < 48:
            said[at] = tokens


@pytest.mark.parametrize("seed", range(4))
async def test_many_requests_at_once(seed):
    rng = random.Random(seed)
    groups, tables = [window(14, slots=16), state(9, slots=10)], {"host": {"slots": 24}}
    said = [[rng.randrange(50) for _ in range(rng.randrange(1, 36))] for _ in range(2)]
    tables |= {"storage": TIERS["storage"]} if seed == 3 else {}
    async with opened(groups, device=32, **tables) as cache:
        model = Model(cache)
        await asyncio.gather(*(guest(model, rng, said, name) for name in "abcdefgh"))
        found = cache.statistics().groups
        assert min(found[name].host_hits for name in found) > 0


async def test_truncate_after_a_call_for_which_the_layout_had_no_block():
    options: Any = {"device": 4, "cache": {"recompute_last_token": False}}
    async with opened([window(30, tokens=40)], **options) as cache:
        model, tokens = Model(cache), list(range(2 * BLOCK))
        await model.serve("a", tokens)
        async with await cache.acquire("a", tokens) as lease, await cache.acquire("b", [99]):
            await model.prefill(lease, tokens)
            assert lease.cached_tokens == len(tokens)
            with pytest.raises(NoRoom):
                await lease.reserve(3 * BLOCK)
            await lease.truncate(len(tokens))
            await model.decode(lease, tokens, [1])


async def test_truncate_to_the_end_of_a_hit_gives_the_later_blocks_back():
    async with opened([window(30, tokens=60)]) as cache:
        model, tokens = Model(cache), list(range(3 * BLOCK))
        await model.serve("a", tokens[: BLOCK + 1])
        async with await cache.acquire("b", tokens) as lease:
            await lease.wait_ready()
            assert lease.cached_tokens == BLOCK
            free = cache.groups["window"].free_blocks().free
            await lease.truncate(BLOCK)
            assert cache.groups["window"].free_blocks().free == free + 2
            await model.decode(lease, tokens[:BLOCK], [1])


async def test_truncate_to_what_a_fork_has_had_is_refused_whatever_the_groups_evict():
    for device, blocks in ((16, 60), (60, 16)):
        async with opened([window(blocks, tokens=60)], device=device) as cache:
            model, tokens = Model(cache), list(range(2 * BLOCK + 1))
            async with await cache.acquire("a", tokens) as lease:
                async with await lease.fork() as fork:
                    await model.prefill(fork, list(tokens))
                for number in range(9):
                    await model.serve("b", [number] * (4 * BLOCK + 1))
                with pytest.raises(TokensCommitted, match="first 8 tokens were shared with a fork"):
                    await lease.truncate(BLOCK + 1)
                await model.prefill(lease, tokens)
                await lease.extend([1] * BLOCK)
                await lease.truncate(2 * BLOCK)
                await model.decode(lease, tokens[: 2 * BLOCK], [2])


@pytest.mark.parametrize("chunk", [None, BLOCK])
async def test_a_fork_shares_no_state_that_passes_still_update(chunk):
    async with opened([state(9)]) as cache:
        model, tokens = Model(cache), list(range(3 * BLOCK))
        for cached in (0, 2 * BLOCK):
            lease = await cache.acquire("a", tokens, chunk_tokens=chunk)
            await lease.wait_ready()
            assert lease.cached_tokens == cached
            if not cached:
                with pytest.raises(NotReady, match="commit these tokens before fork, not 0"):
                    await lease.fork()
            await model.prefill(lease, tokens, chunk=chunk or 2 * BLOCK)
            fork, others = await lease.fork(), list(tokens)
            for _ in range(2 * BLOCK):
                await model.decode(lease, tokens, [1])
                await model.decode(fork, others, [2])
            await lease.finish()
            await fork.finish()
            del tokens[3 * BLOCK :]


async def test_a_thread_asks_where_its_passes_end():
    async with opened([state(30)]) as cache:

        def work():
            with cache.from_thread.acquire("a", list(range(5 * BLOCK + 1))) as lease:
                at, ends = 0, []
                while at < lease.num_tokens:
                    at = lease.pass_end(at, lease.num_tokens)
                    lease.commit(at)
                    ends.append(at)
                return ends

        snapshots = [2 * BLOCK, 4 * BLOCK, 5 * BLOCK]  # every two blocks, and the last full one
        assert await asyncio.to_thread(work) == [*snapshots, 5 * BLOCK + 1]


async def test_groups_are_observed():
    groups = [window(22, slots=16), state(9, slots=4)]
    async with opened(groups, host={"slots": 10}) as cache:
        metrics = CacheMetrics(cache)
        await walk(Model(cache), 1, requests=10)
        shown = metrics.render().decode()
        metrics.close()
        found = cache.statistics().groups
        assert found["state"].prefix.blocks_total == 9
        assert found["window"].device_hits > 0
        hits = f'group="window",tier="device"}} {float(found["window"].device_hits)}'
        assert f"kvactors:group_hits_total{{{hits}" in shown

        cache.groups["state"].system.asleep = 1
        assert [one.component for one in cache.health().reasons] == ["state: cache"]
        cache.groups["state"].system.asleep = 0


@pytest.mark.parametrize("more", [8, 11, 13])
async def test_a_window_is_hit_whose_first_blocks_have_left_the_device(more):
    """An index loads what follows the blocks on the device, not what is before them."""
    async with opened([window(16, tokens=8 * BLOCK + 1, slots=40)], device=60, **TIERS) as cache:
        model, tokens = Model(cache), list(range(10 * BLOCK))
        await model.serve("a", tokens)
        await model.serve("other", list(range(100, 100 + more * BLOCK)))
        await cache.wait_idle()
        turn = [*tokens[: 8 * BLOCK], 1]
        assert cache.lookup(turn).cached_tokens == 8 * BLOCK
        assert await model.serve("again", turn, [2] * 40) == 8 * BLOCK


async def test_a_load_from_the_store_ends_before_a_block_on_the_device():
    """What a request finds may change while it waits."""
    tables = {"storage": TIERS["storage"]}
    async with opened([window(16, tokens=8 * BLOCK + 1)], device=60, **tables) as cache:
        model, tokens = Model(cache), list(range(10 * BLOCK))
        await model.serve("a", tokens)
        await model.serve("other", list(range(100, 100 + 11 * BLOCK)))
        await cache.wait_idle()
        (group,) = cache.layer_groups
        path, scope, _ = cache._lookup_path(tokens)
        found = group.tiers(path, 0, 10, scope)
        stored = [block for block in range(10) if found[block] == STORAGE]
        items = group.item_path(path, [*stored, found.index(DEVICE)], scope)
        index = group.cache.system.index_actor.index
        assert index.match(items, fetch=len(stored) + 1).expected_blocks == len(stored) > 0
        index.pool.give(index.tree.release(items))


async def test_a_chunk_without_room_in_a_group_leaves_the_lease_as_it_was():
    async with opened([window(10)], device=40) as cache:
        model, tokens = Model(cache), list(range(9 * BLOCK))
        first = await cache.acquire("a", tokens, chunk_tokens=2 * BLOCK)
        await first.wait_ready()
        other = await cache.acquire("b", [7] * (6 * BLOCK))  # leaves two of the window's blocks
        held = (cache.free_blocks(), cache.groups["window"].free_blocks())
        for call in (first.next_chunk, first.reserve):
            with pytest.raises(kvactors.NoRoom):
                await call(5 * BLOCK)
            assert (cache.free_blocks(), cache.groups["window"].free_blocks()) == held
        await other.finish()
        await model.prefill(first, tokens, chunk=2 * BLOCK)
        await first.finish(len(tokens))


@pytest.mark.parametrize("kind", ["window", "state"])
async def test_write_through_stores_what_a_request_has_left_behind(kind):
    """A later process, whose prompt leaves that of the request at a block that was given up."""
    storage = {"backend": "memory", "write_policy": "write_through"}
    async with opened(KINDS[kind], storage=storage, host={"slots": 8}) as cache:
        model, tokens = Model(cache), list(range(12 * BLOCK))
        assert await model.serve("a", tokens) == 0
        await cache.wait_idle()
        await cache.clear()
        assert await model.serve("b", [*tokens[: 6 * BLOCK], 7]) == 6 * BLOCK


async def test_a_group_reserves_the_blocks_of_a_turn_beyond_those_it_has_reserved(monkeypatch):
    monkeypatch.setattr(work, "TURN_BLOCKS", 1)
    async with opened([window(20)]) as cache:
        tokens = list(range(BLOCK + 1))
        async with await cache.acquire("a", tokens) as lease:
            for _ in range(3):
                await lease.extend(tokens[:BLOCK])
                assert len(await lease.reserve(BLOCK)) == 1
            assert [len(table) for table in lease.block_tables] == [6, 6]


async def test_a_load_is_shared_by_requests_that_have_its_blocks_at_the_same_positions():
    """Windows that begin at different blocks share blocks at different positions."""
    async with opened([window(40, slots=40)], device=90, host={"slots": 60}) as cache:
        model, tokens = Model(cache), list(range(10 * BLOCK))
        await model.serve("a", tokens)
        await model.serve("other", list(range(100, 100 + 40 * BLOCK)))
        await cache.wait_idle()
        lease = await cache.acquire("b", [*tokens, 1])
        (group,), (part,) = cache.layer_groups, lease._parts
        index, hits = group.cache.system.index_actor.index, part.blocks[: part.hits]
        assert len(index.loading) == len(hits) > 1
        path, scope, _ = cache._lookup_path(tokens)
        for blocks, shared in ((hits, len(hits)), (hits[1:], 0)):
            items = group.item_path(path, blocks, scope)
            assert index.match(items, fetch=0).expected_blocks == shared
            index.pool.give(index.tree.release(items))
        await model.prefill(lease, [*tokens, 1])
        await lease.finish(len(tokens))


async def test_a_clear_of_a_salt_takes_the_items_that_a_request_has_left_behind():
    groups = [window(30), state(16)]
    store = {"backend": "memory", "write_policy": "write_through"}
    async with opened(groups, host={"slots": 4}, storage=store) as cache:
        await Model(cache).serve("a", list(range(40)), salt="tenant")
        await cache.wait_idle()
        assert all(one.statistics().store.objects > 3 for one in cache.groups.values())
        assert (await cache.clear(salt="tenant", storage=True)).unknown_objects == 0
        await cache.wait_idle()
        for one in (cache, *cache.groups.values()):
            assert one.statistics().store.objects == 0


@asynccontextmanager
async def lacking(monkeypatch, **scope: Any) -> AsyncIterator[tuple[Model, Any, list[int]]]:
    """A request that hits 36 tokens, whose group has no room for what it must load."""
    store = {"backend": "memory", "write_policy": "write_through"}
    async with opened([window(30)], host={"slots": 4}, storage=store) as cache:
        model, tokens = Model(cache), list(range(40))
        async with await cache.acquire("a", tokens, **scope) as lease:
            await model.prefill(lease, tokens)
        await cache.wait_idle()
        await cache.clear()
        async with await cache.acquire("b", tokens, **scope) as lease:
            assert lease.pending
            assert lease.cached_tokens > 0

            async def refused(**_: Any) -> None:
                raise NoRoom(1, 0)

            monkeypatch.setattr(lease._parts[0].lease, "wait_ready", refused)
            yield model, lease, tokens


async def test_a_group_without_room_for_what_was_not_loaded_ends_the_hit(monkeypatch):
    async with lacking(monkeypatch) as (model, lease, tokens):
        await lease.wait_ready()
        assert (lease.pending, lease.cached_tokens) == (False, 0)
        await model.prefill(lease, tokens)


@pytest.mark.parametrize("changed", ["weights", "adapter"])
async def test_a_lease_keeps_its_weights_where_it_waits_for_other_blocks(monkeypatch, changed):
    async with lacking(monkeypatch, lora="a") as (model, lease, _):
        cache = model.cache
        await cache.pause()
        waiting = [asyncio.create_task(lease.wait_ready()) for _ in range(2)]
        while cache.statistics().prefix.leases:
            await asyncio.sleep(0)
        await (cache.set_namespace("w") if changed == "weights" else cache.clear(lora="a"))
        await cache.resume()
        first, second = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(first, LeaseEnded)
        assert "changed while it waited" in str(first)
        assert isinstance(second, LeaseEnded)
        await cache.wait_idle()
        assert cache.statistics().prefix.leases == 0


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ([1], TypeError, "group_devices must be a mapping"),
        ({"window": 1}, TypeError, r"group_devices\['window'\] must be a Device"),
    ],
)
def test_devices_of_groups_are_checked(given, error, said):
    with pytest.raises(error, match=said):
        kvactors.open({}, group_devices=given)
