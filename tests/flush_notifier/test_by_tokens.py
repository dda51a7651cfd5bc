"""An index that is addressed by tokens alone gets only blocks that tokens alone identify, also when
scopes share token paths."""

from __future__ import annotations

import random

import numpy as np
import pytest

import kvactors
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import BlocksRemoved, PathCached
from kvactors.identity import CacheScope
from kvactors.native import Path
from kvactors.observe.statistics import residency
from kvactors.settings import Config
from kvactors.types import Reason, Residency, Tier
from tests.flush_notifier.helpers import (
    BLOCK,
    PER_TIER,
    ROOT,
    do,
    finished,
    path,
    path_tokens,
    settle,
)
from tests.support import attentionstore_sdk as stand_in

BY_TOKENS = PER_TIER._replace(by_tokens=True)
ANOTHER = bytes([1]) * 32


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


def other(*branch: int, root: bytes = ANOTHER, extras=()) -> PathCached:
    """The same tokens in another scope, or with extra keys at some blocks."""
    tokens, _ = path(*branch)
    made = Path(BLOCK, root)
    made.extend(np.frombuffer(tokens, "<u4"))
    for block in extras:
        made.set_extra(block, b"image")
    return PathCached(
        root,
        tokens,
        made.hashes(0, len(branch)),
        0,
        len(branch),
        Tier.DEVICE,
        Reason.REQUEST_FINISH,
        root,
    )


def book(limbo: int = 100) -> Ledger:
    return Ledger(BLOCK, [BY_TOKENS, PER_TIER], limbo, token_root=ROOT)


def resident(tasks) -> set[bytes]:
    """The token paths that an index addressed by tokens holds after these tasks."""
    held: set[bytes] = set()
    for task in tasks:
        paths = {
            task.tokens[: 4 * BLOCK * (i + 1)]
            for i in range(task.start_block_idx, task.start_block_idx + task.count)
        }
        held = held | paths if task.residency is Residency.RESIDENT else held - paths
    return held


def test_a_token_path_of_two_scopes_is_gone_when_the_opened_ones_block_is():
    one = book()
    do(one.announce(finished(1, 2)))
    do(one.announce(other(1, 2)))
    tasks = settle(one)
    assert resident(tasks) == {path(1)[0], path(1, 2)[0]}
    do(one.lose(other(1, 2).hashes, Tier.DEVICE, Reason.DEVICE_DROP))
    tasks += settle(one)
    assert resident(tasks) == {path(1)[0], path(1, 2)[0]}, (
        "the other scope's blocks went, not these"
    )
    do(one.lose(path(1, 2)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    tasks += settle(one)
    assert resident(tasks) == set()
    one.check()


@pytest.mark.parametrize(
    ("message", "blocks"),
    [(other(1, 2), 0), (other(1, 2, 3, root=ROOT, extras=(1,)), 1), (finished(1, 2, 3), 3)],
)
def test_only_leading_blocks_without_extra_keys_of_the_opened_scope_are_announced(message, blocks):
    one = book()
    do(one.announce(message))
    assert len(resident(settle(one))) == blocks
    assert sum(task.count for task in settle(one, 1)) == len(message.hashes) // 32, (
        "a sink that knows block hashes gets all"
    )
    one.check()


# -- a whole cache, whose index is compared with its tiers

BLOCKS = 4


def config(**tables) -> Config:
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCKS},
            "device": {"num_blocks": 12},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2},
            "attention_store": {"sdk": "tests.support.attentionstore_sdk"},
            "flush": {"sinks": [{"kind": "attention_store"}, {"kind": "memory"}]},
            **tables,
        }
    )


def plain_paths(cache) -> set[tuple[int, ...]]:
    """Token paths of blocks on device or host that tokens alone identify and requests can get,
    recomputed from the ledger's paths."""
    if cache.namespace != cache.config.cache.namespace:
        return set()
    root = CacheScope(cache.config.cache.model, cache.config.cache.namespace).root(
        cache.system.layout.fingerprint
    )
    ledger, found = cache.system.notifier_actor.ledger, set()
    held = residency(cache.system)
    for key in held[Tier.DEVICE] | held[Tier.HOST]:
        tokens = np.frombuffer(path_tokens(ledger, key), "<u4")
        plain = Path(BLOCKS, root)
        plain.extend(tokens)
        if (
            plain.hashes(0, plain.num_full_blocks)[-32:] == key
            and ledger.tree.finished[ledger.tree.find(key)]
        ):
            found.add(tuple(tokens.tolist()))
    return found


async def serve(cache, tokens, **identity) -> None:
    async with await cache.acquire("r", tokens, **identity) as lease:
        await lease.wait_ready()
        await lease.commit(lease.num_tokens)


@pytest.mark.parametrize("seed", range(6))
async def test_the_index_holds_the_blocks_that_tokens_identify_after_any_run(seed):
    draw = random.Random(seed)
    scopes = [
        {},
        {},
        {"salt": "a"},
        {"lora": "x"},
        {"extra_keys": [(5, 2, 1)]},
        {"extra_keys": [(7, 2, 2)]},
    ]
    async with kvactors.open(config(host={"slots": draw.choice([0, 6])})) as cache:
        for number in range(60):
            if draw.random() < 0.1:
                await cache.set_namespace(draw.choice(["default", "w2"]))
            if draw.random() < 0.03:
                await cache.clear()
            tokens = [draw.randrange(2)] * BLOCKS + list(range(BLOCKS * draw.randint(1, 3) + 1))
            await serve(cache, tokens, **draw.choice(scopes))
            if number % 20 == 19:
                await cache.wait_flushed()
                assert stand_in.service().resident == plain_paths(cache)
                assert (cache.count_divergent_blocks(), cache.check()) == (0, [])


async def test_a_restarted_notifier_still_separates_scopes():
    async with kvactors.open(config()) as cache:
        shared = list(range(2 * BLOCKS + 1))
        for identity in ({}, {"salt": "a"}, {"extra_keys": [(5, 1, "cat.png")]}):
            await serve(cache, shared, **identity)
        await cache.wait_flushed()
        assert len(stand_in.service().resident) == 2
        cache.system.notifier_actor.ledger = None  # type: ignore[assignment]
        await cache.system.notifier.tell(BlocksRemoved(bytes(32), Tier.DEVICE, Reason.CLEAR))
        await cache.wait_idle()
        await cache.wait_flushed()
        assert stand_in.service().resident == plain_paths(cache)
        assert len(stand_in.service().resident) == 2
