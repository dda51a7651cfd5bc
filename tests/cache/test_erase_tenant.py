"""`clear(salt=, storage=True)` and `erase=True`: nothing of a tenant is hit afterwards in any tier, and
on request none of its bytes are left in the files of the store."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.errors import KVActorsError, StoreError, StoreUnsupported
from kvactors.native import BlockTree
from kvactors.quotas import salt_id
from kvactors.storage.catalog import Catalog
from kvactors.storage.messages import Outcome
from tests.cache.test_quotas import BLOCK, settle, tokens_of, use
from tests.cache.test_storage_quotas import store
from tests.support.cache import opened, serve, settings
from tests.support.sim_pool import SimPool

HOST = {"slots": 4, "transit_slots": 8}


def files(folder, **more):
    return store(64, kind="file", directory=str(folder), **more)


async def found(cache, salt, *numbers, blocks=2):
    """Cached blocks of prompts: what `lookup` counts, and what requests hit."""
    counted = hit = 0
    for number in numbers:
        tokens = [*tokens_of(number, blocks), 1]
        counted += cache.lookup(tokens, salt=salt).total
        lease = await cache.acquire("again", tokens, salt=salt)
        await lease.wait_ready()
        hit += lease.cached_tokens // BLOCK
        await lease.finish()
    return counted, hit


async def fill(cache, *salts, blocks=2):
    """Two prompts of each tenant, in every tier, with the bytes of the reference engine."""
    for salt in salts:
        for number in (1, 2):
            tokens = [*tokens_of(number, blocks), 1]
            await serve(cache, f"{salt} {number}", tokens, salt=salt)
    await cache.wait_idle()


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_tenant_is_not_hit_in_any_tier_afterwards_and_others_are(tmp_path, kind):
    disk = files(tmp_path) if kind == "file" else store(64)
    async with opened(device=32, host=HOST, storage=disk) as cache:
        await fill(cache, "gone", "stays", None)
        cleared = await cache.clear(salt="gone", storage=True)
        assert cleared == (4, 0)
        assert await found(cache, "gone", 1, 2) == (0, 0)
        assert await found(cache, "stays", 1, 2) == (4, 4)
        await settle(cache)  # the sink has what the tiers hold
        if kind == "file":
            assert all(
                one.salt != salt_id("gone")
                for one in cache.system.evictor_actor.host.blocks.values()
            )
    if kind == "file":
        async with opened(device=32, host=HOST, storage=disk) as cache:
            assert await found(cache, "gone", 1, 2) == (0, 0)
            assert await found(cache, "stays", 1, 2) == (4, 4)
            assert await found(cache, None, 1, 2) == (4, 4)


async def test_without_storage_the_store_keeps_the_tenant_and_is_hit():
    async with opened(device=32, host=HOST, storage=store(64)) as cache:
        await fill(cache, "gone")
        assert (await cache.clear(salt="gone")).device_blocks == 4
        assert await found(cache, "gone", 1, 2) == (4, 4)


def payloads(cache, salt):
    """The bytes of a tenant's blocks, as the store has them."""
    store = cache.system.store
    files = store.inner.files
    found = []
    for key, (slot, _) in store.inner.objects.items():
        if store.inner.catalog.salt(key) == salt_id(salt):
            slab, index = divmod(slot, files.meta.slots_per_slab)
            data = (files.folder / f"slab-{slab:04}").read_bytes()
            at = index * files.meta.stride
            found.append(data[at : at + files.meta.block_bytes])
    return found


def contents(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("zero_range", [True, False])
async def test_bytes_of_an_erased_tenant_are_not_in_the_files(
    tmp_path, monkeypatch, whole, zero_range
):
    """Neither payloads nor table entries, which have the tokens, of objects that were evicted
    before as well."""
    if not zero_range:  # a file system that cannot
        monkeypatch.setattr(kvactors.native, "FALLOC_FL_ZERO_RANGE", 1 << 30)
    async with opened(device=32, storage=files(tmp_path, keep_tokens=True)) as cache:
        await fill(cache, "gone", "stays")
        secret, kept = payloads(cache, "gone"), payloads(cache, "stays")
        catalog = cache.system.store.inner.catalog
        keys = [key for key in catalog if catalog.salt(key) == salt_id("gone")]
        assert len(secret) == len(kept) == 4
        assert all(one in contents(tmp_path) for one in (*secret, *keys))
        evicted = catalog.evict(())
        await cache.system.store.inner.erase([evicted])
        await cache.clear(storage=True, erase=True, salt=None if whole else "gone")
        left = contents(tmp_path)
        assert not any(one in left for one in (*secret, *keys))
        assert all(one in left for one in kept) == (not whole)
        await fill(cache, "gone", "stays")
        await settle(cache)


async def test_objects_of_the_earlier_format_stay_and_are_counted(tmp_path, monkeypatch):
    disk = files(tmp_path)
    with monkeypatch.context() as earlier:  # writes entries without salts
        earlier.setattr(Catalog, "salt", lambda catalog, key: None)
        async with opened(device=32, storage=disk) as cache:
            await fill(cache, "gone")
    async with opened(device=32, storage=disk) as cache:
        await fill(cache, "new")
        assert await cache.clear(salt="gone", storage=True) == (0, 4)
        assert await found(cache, "gone", 1, 2) == (4, 4)
        assert (await cache.clear(storage=True)).unknown_objects == 0
        assert await found(cache, "gone", 1, 2) == (0, 0)


async def test_a_store_without_salts_refuses_and_nothing_is_cleared():
    config = settings(storage=store(64))
    pool = SimPool(bytes(32), kvactors.device.layout_for(config, None).block_bytes)
    async with kvactors.open(config, backend=pool) as cache:
        await fill(cache, "gone")
        for options in ({"salt": "gone"}, {"lora": "adapter"}, {"erase": True}):
            with pytest.raises(StoreUnsupported, match="nothing was cleared"):
                await cache.clear(storage=True, **options)
        assert cache.lookup([*tokens_of(1), 1], salt="gone").device == 2
        with pytest.raises(ValueError, match="storage=True"):
            await cache.clear(salt="gone", erase=True)


async def test_after_a_failure_the_whole_store_is_cleared(tmp_path):
    async with opened(device=32, storage=files(tmp_path)) as cache:
        await fill(cache, "gone", "stays")
        medium = cache.system.store.inner
        erase = medium.erase

        async def refuse(keys):
            await erase(keys)
            return Outcome.UNAVAILABLE

        medium.erase = refuse
        with pytest.raises(StoreError, match="could not be deleted"):
            await cache.clear(salt="gone", storage=True)
        del medium.erase
        await cache.clear()
        assert await found(cache, "stays", 1, 2) == (0, 0)
        assert await cache.clear(salt="gone", storage=True) == (0, 0)
        assert cache.system.store.count() == 0
        await fill(cache, "stays")
        await settle(cache)


async def test_an_erasure_stops_at_the_deadline_and_can_be_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("kvactors.storage.file.store.WIPE_BYTES", 1)
    async with opened(device=32, storage=files(tmp_path)) as cache:
        await fill(cache, "gone")
        medium, looks = cache.system.store.inner, iter([False] * 3)
        secret = payloads(cache, "gone")
        await cache.clear(storage=True)
        free = len(medium.supply.free)
        assert "deadline" in await medium.wipe(lambda: next(looks, True))
        assert len(medium.supply.free) == free
        assert any(one in contents(tmp_path) for one in secret)
        wiped, calls = cache.system.store.inner.files.wipe, []
        monkeypatch.setattr(
            cache.system.store.inner.files,
            "wipe",
            lambda slots: (calls.append(slots), wiped(slots)),
        )
        await cache.clear(storage=True, erase=True)
        assert len(calls) == free  # a slot a step
        assert not any(one in contents(tmp_path) for one in secret)


async def test_an_erasure_ends_when_the_cache_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("kvactors.storage.file.store.WIPE_BYTES", 1)
    config = settings(device=32, storage=files(tmp_path))
    async with kvactors.open(config) as cache:
        await fill(cache, "gone")
        files_, begun = cache.system.store.inner.files, asyncio.Event()
        loop, wiped = asyncio.get_running_loop(), files_.wipe

        def wipe(slots):
            loop.call_soon_threadsafe(begun.set)
            wiped(slots)

        files_.wipe = wipe
        clearing = asyncio.create_task(cache.clear(storage=True, erase=True))
        await begun.wait()
    with pytest.raises(KVActorsError):
        await clearing


# -- a clear of one salt takes several turns


class OneBlockSteps:
    """A tree whose steps of a clear cover one block each."""

    def __init__(self, tree: BlockTree) -> None:
        self._tree = tree

    def __getattr__(self, name):
        return getattr(self._tree, name)

    def forget_step(self, count, hashes):
        return self._tree.forget_step(1, hashes)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("host", [{}, {"slots": 8, "transit_slots": 8}])
async def test_blocks_of_a_clear_in_progress_are_taken_without_a_copy(wait, host):
    async with opened(device=8, host=host) as cache:
        await use(cache, 1, salt="a", blocks=8)
        core = cache.system.index_actor.index
        core.turn_blocks, core.tree = 8, OneBlockSteps(tree := core.tree)
        task = asyncio.create_task(cache.clear(salt="a"))
        await asyncio.sleep(0)
        core.tree = tree
        assert not task.done()
        lease = await cache.acquire("next", tokens_of(2, 6), salt="b", wait_for_evictions=wait)
        await task
        await lease.finish(6 * BLOCK)
        await cache.wait_idle()
        assert cache.statistics().prefix.offloads_in_flight == 0
        assert host == {} or cache.statistics().host.offloaded == 0
        await settle(cache)
