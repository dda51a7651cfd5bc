"""Blocks are hashed when they enter the tree if a sink or another tier needs it, otherwise when a
caller asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.actor.actor import Handler
from kvactors.cache import KVCache
from kvactors.hints import Hints
from kvactors.lookup import FIRST_STEP_BLOCKS
from kvactors.native import BlockTree, Path, chain_hashes
from kvactors.observe import invariants
from kvactors.prefix_index.tree import BlockIndex
from kvactors.types import HASH_BYTES, split_hashes
from tests.support.cache import BLOCK, opened, prompt

ROOT = bytes(32)
LONG = 16
"""Blocks of a part, for tests of long requests."""
HOST = {"slots": 8, "transit_slots": 16}
STORE = {"backend": "memory", "write_policy": "write_through"}


def stored(tree: BlockTree, tokens: list[int], first: int = 0) -> Path:
    """A path whose blocks are committed, from device block `first` on."""
    path = Path(tree.block_size, ROOT)
    path.extend(tokens)
    run, _ = tree.pin(path)
    blocks = path.num_full_blocks
    path.assign(run, range(first + run, first + blocks))
    tree.commit(path, blocks)
    tree.release(path)
    return path


@pytest.mark.parametrize(
    ("options", "eager"),
    [
        ({"sinks": ()}, False),
        ({"sinks": (), "host": HOST}, True),
        ({"sinks": (), "storage": STORE}, True),
        ({}, True),
    ],
    ids=["device", "host", "storage", "sink"],
)
async def test_a_device_that_no_sink_follows_hashes_nothing(
    options: dict[str, Any], eager: bool
) -> None:
    async with opened(device=6, **options) as cache:
        index = cache.system.index_actor.index
        for number in range(4):
            lease = await cache.acquire(f"r{number}", prompt(number, 3))
            await lease.wait_ready()
            await lease.finish(3 * BLOCK)
        await cache.wait_idle()
        assert cache.system.index_actor.evictions.evicted >= 6
        assert (index.tree.hashed > 0) is index.hashes is eager
        hits = await cache.acquire("again", prompt(3, 3, tail=1))
        assert hits.cached_tokens == 3 * BLOCK
        assert hits.hashes(0, 3) == chain_hashes(hits._path.root, prompt(3, 3), BLOCK)
        hits.abandon()


def test_a_path_takes_the_hashes_that_the_tree_has() -> None:
    tree = BlockTree(2)
    tokens = list(range(12))
    stored(tree, tokens[:8])
    tree.device_hashes()
    stored(tree, tokens)
    assert tree.hashed == 4
    path = Path(2, ROOT)
    path.extend(tokens)
    tree.pin(path)
    assert path.hashes(0, 6) == chain_hashes(ROOT, tokens, 2)
    with pytest.raises(ValueError, match="already has a name"):
        path.set_extra(5, b"image")
    tree.release(path)
    with pytest.raises(ValueError, match="already has a name"):
        path.set_extra(5, b"image")


def test_a_tree_that_is_renewed_hashes_as_the_one_before() -> None:
    for hashes in (False, True):
        index = BlockIndex(2, 8, 8, recompute_last_token=False, hashes=hashes)
        index.retire()
        stored(index.tree, list(range(8)))
        assert index.tree.hashed == (4 if hashes else 0)


def test_an_eviction_from_a_device_alone_has_no_hashes() -> None:
    for hashes in (False, True):
        index = BlockIndex(2, 8, 8, recompute_last_token=False, hashes=hashes)
        index.take(4)
        stored(index.tree, list(range(8)))
        eviction, size = index.evict(1, 1), HASH_BYTES * hashes
        assert (len(eviction.hashes), len(eviction.parents)) == (size, size)
        freed, _, hosted, lost = index.drop(1, 0, 0)
        assert (freed, hosted, len(lost)) == (1, b"", size)
        assert index.tree.hashed == (4 if hashes else 0)


async def hashed_by_turn(
    cache: KVCache, path: Path, asked: Awaitable[Any]
) -> tuple[Any, list[int]]:
    """The result of a call, and how many blocks of a path each turn of the index hashes."""
    index = cache.system.index_actor
    counts = [path.num_hashed]

    def counted(handler: Handler) -> Handler:
        def handle(*arguments: Any) -> None:
            handler(*arguments)
            counts.append(path.num_hashed)

        return handle

    index.handlers.update({kind: counted(handler) for kind, handler in index.handlers.items()})
    result = await asked
    return result, [after - before for before, after in pairwise(counts) if after > before]


async def test_a_pin_of_a_long_request_hashes_a_part_a_turn() -> None:
    blocks = 3 * LONG + 5
    tokens = prompt(0, blocks)
    async with opened(device=4 * blocks, sinks=()) as cache:
        cache.system.index_actor.index.turn_blocks = LONG
        lease = await cache.acquire("long", tokens)
        path = lease._path
        await lease.commit(len(tokens))
        pin = Hints(pin=True)
        _, hashed = await hashed_by_turn(cache, path, lease.finish(hints=pin))
        assert lease.pinned_blocks == blocks == path.num_hashed
        assert hashed == [LONG, LONG, LONG, 5]
        assert await cache.unpin(tokens) == blocks
        assert await cache.unpin(tokens) == 0


class Ticks:
    """Turns of the loop that another task gets."""

    count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("call", ["acquire", "prefetch"])
@pytest.mark.parametrize("answerable", [True, False], ids=["inventory", "query only"])
async def test_other_tasks_run_while_a_long_prompt_is_hashed(
    call: str, answerable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks are hashed that the store may have."""
    monkeypatch.setattr(invariants, "SLICE_S", 0)
    blocks, step = 4 * LONG, LONG // 4
    tokens = prompt(0, blocks, tail=1)
    async with opened(device=blocks + 1, sinks=(), storage=STORE, host=HOST) as cache:
        index = cache.system.index_actor.index
        if answerable:
            keys = chain_hashes(cache.system.roots.plain, tokens, BLOCK)
            held = set(split_hashes(keys))
            monkeypatch.setattr(cache.system.store.inner, "holds", held.__contains__)
        else:
            monkeypatch.setattr(cache.system.store.inner, "is_complete", False)
        index.turn_blocks = LONG
        ticks = Ticks()
        other = asyncio.create_task(ticks.run())
        if call == "acquire":
            lease = await cache.acquire("long", tokens)
            assert lease._path.num_hashed == blocks
            lease.abandon()
        else:
            assert await cache.prefetch(tokens) == blocks
        assert ticks.count >= blocks // step
        other.cancel()


async def test_a_prompt_that_no_tier_has_is_not_hashed() -> None:
    blocks = 4 * LONG
    async with opened(device=blocks + 1, sinks=(), storage=STORE, host=HOST) as cache:
        cache.system.index_actor.index.turn_blocks = LONG
        lease = await cache.acquire("long", prompt(0, blocks, tail=1))
        assert lease._path.num_hashed <= FIRST_STEP_BLOCKS
        lease.abandon()


@given(st.data())
def test_the_inputs_of_hashes_are_found_over_any_ancestors(data: st.DataObject) -> None:
    tree, block = BlockTree(1), 0
    wanted: dict[int, tuple[bytes, int, bytes]] = {}
    grown: list[tuple[bytes, list[int], dict[int, bytes]]] = [
        (bytes([n]) * 32, [], {}) for n in range(2)
    ]
    for number in range(data.draw(st.integers(1, 8))):
        root, above, known = data.draw(st.sampled_from(grown))
        shared = data.draw(st.integers(0, len(above)))
        own = range(1000 * number, 1000 * number + data.draw(st.integers(1, 150)))
        tokens = [*above[:shared], *own]
        extras = {at: extra for at, extra in known.items() if at < shared}
        if data.draw(st.booleans()):
            extras[data.draw(st.integers(shared, len(tokens) - 1))] = b"media"
        path = Path(1, root)
        path.extend(tokens)
        for at, extra in extras.items():
            path.set_extra(at, extra)
        run, _ = tree.pin(path)
        path.assign(run, range(block, block + len(tokens) - run))
        tree.commit(path, len(tokens))
        tree.release(path)
        for at in range(run, len(tokens)):
            wanted[block + at - run] = root, tokens[at], extras.get(at, b"")
        block += len(tokens) - run
        grown.append((root, tokens, extras))
    count = data.draw(st.integers(1, block))
    nodes, _, _, blocks, *_ = tree.evict(count, hashes=False)
    roots, inputs, found = tree.contents(nodes)
    assert split_hashes(roots) == [wanted[one][0] for one in blocks]
    assert list(memoryview(inputs).cast("I")) == [wanted[one][1] for one in blocks]
    assert dict(found) == {j: wanted[one][2] for j, one in enumerate(blocks) if wanted[one][2]}
