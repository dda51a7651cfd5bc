"""After a restart the file store's blocks are announced: those that requests would find, with their
paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import kvactors
from kvactors.actor.message import Control
from kvactors.flush_notifier import ledger
from kvactors.flush_notifier.messages import PathPart
from kvactors.storage import actors
from kvactors.types import Tier, split_hashes
from tests.storage.helpers import after_each_message

BLOCK = 4


def config(folder, sinks=("index",), policy="write_through", **storage) -> kvactors.Config:
    return kvactors.Config.from_mapping(
        {
            "cache": {
                "model": "m",
                "block_size": BLOCK,
                "namespace": storage.pop("cache_namespace", "default"),
            },
            "device": {"num_blocks": 64},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
            "host": {"slots": 16, "transit_slots": 64},
            "storage": {
                "backend": "file",
                "directory": str(folder),
                "capacity_blocks": 500,
                "write_policy": policy,
                "timeout_s": 60.0,
                **storage,
            },
            "flush": {
                "sinks": [
                    {"kind": "memory", "name": name, "tiers": ["device", "host", "storage"]}
                    for name in sinks
                ]
            },
        }
    )


async def serve(cache, name: str, tokens: list[int], **scope):
    """Serve one request. Returns its hits and the names of its full blocks."""
    lease = await cache.acquire(name, tokens, **scope)
    await lease.wait_ready()
    keys = lease.hashes(0, len(tokens) // BLOCK)
    await lease.commit(len(tokens))
    await lease.finish()
    await cache.wait_idle()
    return lease.hits, split_hashes(keys)


def announced(cache) -> set[bytes]:
    return set(cache.sinks["index"].view()[Tier.STORAGE])


def prompt(seed: int, blocks: int = 5) -> list[int]:
    return [7] * (2 * BLOCK) + [seed] * (BLOCK * (blocks - 2)) + [1]


def prompts() -> list[list[int]]:
    return [prompt(seed, blocks) for seed in range(10, 40) for blocks in (3, 6, 9)]


async def filled(settings, seeds=range(10, 20), **scope) -> set[bytes]:
    """Write requests. Returns the names of the stored blocks."""
    async with kvactors.open(settings) as cache:
        for seed in seeds:
            await serve(cache, str(seed), prompt(seed), **scope)
        assert cache.statistics().store.faults == 0
        return set(cache.system.store.keys())


async def truth(cache) -> None:
    """The announced blocks of each prompt are those that a request for it gets, and no others are
    announced."""
    reachable = set()
    for i, tokens in enumerate(prompts()):
        before = announced(cache)
        hits, keys = await serve(cache, f"t{i}", tokens)
        run = next((j for j, key in enumerate(keys) if key not in before), len(keys))
        assert hits.storage + hits.host + hits.device >= run
        if not (hits.host or hits.device):
            assert hits.storage == run
        reachable |= set(keys)
        await cache.wait_flushed()
        assert cache.count_divergent_blocks() == 0
    assert announced(cache) <= reachable


@pytest.mark.parametrize("at_rest", [True, False])
@pytest.mark.parametrize("limit", [1, 3, 256])
async def test_stored_blocks_are_announced_after_a_restart(tmp_path, monkeypatch, at_rest, limit):
    before = await filled(config(tmp_path))
    assert len(before) == 2 + 10 * 3
    monkeypatch.setattr(actors, "PATH_PAGE", limit)
    monkeypatch.setattr(ledger, "MAX_WAITING_ORPHANS", 1)
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.wait_flushed(at_rest=at_rest)
        assert announced(cache) == before
        assert cache.count_divergent_blocks() == 0
        assert cache.check() == []
        hits, _ = await serve(cache, "again", prompt(10))
        assert hits.storage == 5


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
async def test_after_a_kill_requests_get_exactly_the_announced_blocks(tmp_path, policy):
    worker = subprocess.Popen(  # noqa: ASYNC220  (it is read in a thread, and killed)
        [sys.executable, str(Path(__file__).with_name("restart_worker.py")), str(tmp_path), policy],
        stdout=subprocess.PIPE,
    )
    try:
        with anyio.fail_after(120):
            assert await anyio.to_thread.run_sync(worker.stdout.readline) == b"ready\n"
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    async with kvactors.open(config(tmp_path, policy=policy)) as cache:
        await cache.wait_flushed()
        held = set(cache.system.store.keys())
        assert len(held) > 20
        assert announced(cache) <= held
        if policy == "write_through":
            assert announced(cache)
        assert cache.check() == []
        await truth(cache)


async def test_a_block_whose_parent_is_gone_waits_for_it(tmp_path):
    before = await filled(config(tmp_path))
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.wait_flushed()
        _, keys = await serve(cache, "x", prompt(10))
        await cache.system.store.remove([keys[1]])
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.wait_flushed()
        assert announced(cache) == {keys[0]}
        assert len(cache.system.notifier_actor.ledger.orphans.waiting) == 30
        await serve(cache, "only the beginning", prompt(99, 3))
        await cache.wait_flushed()
        assert announced(cache) >= before
        assert not cache.system.notifier_actor.ledger.orphans.waiting
        assert cache.check() == []


async def test_nothing_under_a_salt_is_kept_or_announced(tmp_path):
    before = await filled(config(tmp_path), salt="secret-of-a-tenant")
    assert len(before) == 32
    table = next(tmp_path.rglob("table")).read_bytes()
    assert b"secret-of-a-tenant" not in table
    assert (b"\x0a\0\0\0" * BLOCK) not in table
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.wait_flushed()
        assert announced(cache) == set()
        hits, keys = await serve(cache, "supplies the path", prompt(10), salt="secret-of-a-tenant")
        assert hits.storage == 5
        await cache.wait_flushed()
        assert announced(cache) == set(keys)


async def test_an_adapter_and_media_are_announced_with_their_blocks(tmp_path):
    scope = {"lora": "adapter", "lora_id": 7, "extra_keys": [(BLOCK, BLOCK + 1, "image")]}

    def places(cache) -> dict[bytes, tuple]:
        """Of each stored block its parent, tokens, extra key and scope, as they were sent to the
        sink."""
        found = {}
        for task in cache.sinks["index"].tasks:
            if task.tier is Tier.STORAGE:
                keys, extra_keys, size = split_hashes(task.hashes), dict(task.extra_keys), 4 * BLOCK
                for i, (parent, key) in enumerate(
                    zip([task.parent, *keys], keys, strict=False), task.start_block_idx
                ):
                    found[key] = (
                        parent,
                        task.tokens[i * size : (i + 1) * size],
                        extra_keys.get(i, b""),
                        task.scope,
                    )
        return found

    async with kvactors.open(config(tmp_path)) as cache:
        await serve(cache, "first", prompt(10), **scope)
        await cache.wait_flushed()
        live = places(cache)
        assert len(live) == 5
        assert sum(bool(extra_key) for _, _, extra_key, _ in live.values()) == 2
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.wait_flushed()
        assert places(cache) == live


async def test_blocks_of_another_namespace_are_not_announced(tmp_path):
    await filled(config(tmp_path, cache_namespace="weights-1"))
    async with kvactors.open(config(tmp_path, cache_namespace="weights-2")) as cache:
        await cache.wait_flushed()
        assert announced(cache) == set()
        assert (await serve(cache, "x", prompt(10)))[0].storage == 0


async def test_damaged_lineages_cost_the_announcement_of_their_paths_only(tmp_path, caplog):
    before = await filled(config(tmp_path))
    import xxhash

    from kvactors.storage.file.table import FIELD, PAGE, TOKENS, meta_of

    path = next(tmp_path.rglob("table"))
    raw = bytearray(path.read_bytes())
    size = meta_of(bytes(raw[:PAGE]), "").entry_bytes
    damaged = set()
    for at in range(PAGE, len(raw), size):
        entry = bytearray(raw[at : at + size])
        field = FIELD.pack(TOKENS, 4 * BLOCK) + (12).to_bytes(4, "little")
        if (
            where := entry.find(field)
        ) >= 0:  # the tokens of prompt(12): another number, under a good checksum
            entry[where + 4] = 77
            entry[-8:] = xxhash.xxh3_64_intdigest(bytes(entry[:-8])).to_bytes(8, "little")
            raw[at : at + size] = entry
            damaged.add(bytes(entry[48:80]))
    assert len(damaged) == 3
    path.write_bytes(raw)
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.wait_flushed()
        assert announced(cache) == before - damaged
        assert (await serve(cache, "x", prompt(12)))[0].storage == 5
        await cache.wait_flushed()
        assert announced(cache) == before


async def test_a_clear_while_the_paths_are_read(tmp_path, monkeypatch):
    await filled(config(tmp_path))
    monkeypatch.setattr(actors, "PATH_PAGE", 1)
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.clear(storage=True)
        await serve(cache, "x", prompt(50))
        await cache.wait_flushed()
        assert announced(cache) == set(cache.system.store.keys())
        assert len(announced(cache)) == 5
        assert cache.check() == []


class Unknown(Control, frozen=True, eq=False):
    """No actor handles it."""


@pytest.mark.parametrize("fails", ["notifier", "writer"])
async def test_the_paths_are_sent_again_after_a_failure(tmp_path, monkeypatch, fails):
    before = await filled(config(tmp_path))
    monkeypatch.setattr(actors, "PATH_PAGE", 2)
    sent = []

    def recording(one, to, message):
        if isinstance(message, actors.PathsFound):
            sent.append(message)
            if len(sent) == 3:
                (cache.system.notifier if fails == "notifier" else one.ref).try_tell(Unknown())

    after_each_message(monkeypatch, actors.StorageWriter, recording)
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.wait_flushed()
        assert (
            cache.system.notifier if fails == "notifier" else cache.system.writers[0]
        ).incarnation == 1
        assert announced(cache) == before
        assert cache.check() == []


async def test_a_cache_that_closes_does_not_read_the_rest(tmp_path, monkeypatch):
    await filled(config(tmp_path))
    monkeypatch.setattr(actors, "PATH_PAGE", 1)
    sent = []
    after_each_message(
        monkeypatch,
        actors.StorageWriter,
        lambda one, to, message: isinstance(message, actors.PathsFound) and sent.append(message),
    )
    async with kvactors.open(config(tmp_path)):
        pass
    assert len(sent) < 10


async def test_names_of_blocks_that_are_nowhere_are_ignored(tmp_path):
    await filled(config(tmp_path))
    async with kvactors.open(config(tmp_path)) as cache:
        await cache.wait_flushed()
        ledger = cache.system.notifier_actor.ledger
        before = len(ledger.tree)
        root = cache.system.roots.root(kvactors.identity.PLAIN)
        lineage = kvactors.identity.Lineage(root, bytes(4 * BLOCK))
        part = PathPart(root, lineage.block_hash(), lineage.tokens)
        cache.system.notifier.try_tell(actors.PathsFound((part,), frozenset([root])))
        await cache.wait_idle()
        assert len(ledger.tree) == before
        assert not ledger.orphans.waiting
        assert cache.check() == []
