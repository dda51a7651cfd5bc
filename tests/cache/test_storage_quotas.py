"""Quotas of salts in the store, through the public API."""

from __future__ import annotations

import pytest

import kvactors
from kvactors import KVCache
from kvactors.errors import ConfigError, StoreUnsupported
from kvactors.quotas import salt_id
from kvactors.settings.load import quota_faults
from kvactors.settings.tables import QuotaConfig, StorageConfig
from tests.cache.test_quotas import BLOCK, settle, tokens_of, use
from tests.support.cache import opened


def store(capacity=8, kind="memory", **more):
    return {"backend": kind, "capacity_blocks": capacity, "write_policy": "write_through", **more}


def stored(cache: KVCache, number, *, salt=None, blocks=2) -> int:
    """Leading blocks of a prompt that the store has."""
    roots = cache.system.roots
    path, _ = kvactors.checks.request_path(
        BLOCK, roots.root(kvactors.checks.request_scope(salt, None)), tokens_of(number, blocks), ()
    )
    hashes = path.hashes(0, blocks)
    names = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
    return cache.system.store.held_run(names)


async def test_a_flood_of_one_salt_leaves_the_blocks_of_another_in_the_store():
    quota = {"salts": {"noisy": {"storage": 4}}}
    async with opened(storage=store(), quota=quota) as cache:
        await use(cache, 1, salt="quiet")
        for number in range(2, 12):
            await use(cache, number, salt="noisy")
            await cache.wait_idle()
        assert stored(cache, 1, salt="quiet") == 2
        tenants = cache.tenants()
        noisy = tenants.named["noisy"]
        assert (noisy.storage_blocks, noisy.storage_quota) == (6, 4)
        assert noisy.storage_quota_evictions == 14
        assert tenants.unnamed["quiet"].storage_blocks == 2
        assert cache.statistics().store.quota_evictions == 14
        await settle(cache)


async def test_a_quota_of_the_store_can_be_changed_while_the_cache_runs():
    async with opened(storage=store()) as cache:
        await use(cache, 1, salt="quiet")
        await cache.wait_idle()
        await cache.set_quota("noisy", storage=2)
        await use(cache, 2, salt="noisy", blocks=6)
        await cache.wait_idle()
        assert stored(cache, 2, salt="noisy", blocks=6) == 6  # free space beyond the quota
        for number in range(3, 12):
            await use(cache, number, salt="noisy")
            await cache.wait_idle()
        assert stored(cache, 1, salt="quiet") == 2
        assert cache.tenants().named["noisy"].storage_blocks == 6
        assert cache.tenants().unnamed["quiet"].storage_blocks == 2
        with pytest.raises(ValueError, match="storage"):
            await cache.set_quota("noisy", storage=0)
        with pytest.raises(ValueError, match="one block takes"):
            await cache.set_quota("noisy", storage="1 B")
        await cache.set_quota("noisy")
        assert "noisy" not in cache.tenants().named
        await settle(cache)


# -- files


async def test_a_file_store_that_is_opened_again_has_the_salts(tmp_path):
    disk, quota = store(kind="file", directory=str(tmp_path)), {"storage": 4}
    async with opened(storage=disk, quota=quota) as cache:
        await use(cache, 1, salt="quiet")
        await use(cache, 2)
        await use(cache, 3, salt="noisy", blocks=4)
    async with opened(storage=disk, quota=quota) as cache:
        await use(cache, 4, salt="noisy", blocks=2)
        await cache.wait_idle()
        assert stored(cache, 1, salt="quiet") == 2
        assert stored(cache, 2) == 2
        shares = cache.system.store.shares
        held = {salt: shares.held(salt_id(salt)) for salt in ("quiet", "noisy", None)}
        assert held == {"quiet": 2, "noisy": 4, None: 2}
        assert cache.tenants().others.storage_blocks == 4  # no salt, and no request of "quiet" yet
        await settle(cache)


# -- stores without quotas


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"storage": {"backend": "mooncake"}}, "mooncake evicts its objects itself"),
        ({"storage": {"backend": "attention_store"}}, "attention_store evicts"),
        ({}, "'none' keeps no quota"),
    ],
)
@pytest.mark.parametrize("quota", [{"storage": 4}, {"salts": {"a": {"storage": 4}}}])
async def test_a_quota_that_the_store_cannot_keep_is_refused_with_the_reason(tables, reason, quota):
    with pytest.raises(ConfigError, match=reason):
        async with opened(quota=quota, **tables):
            pass


def test_stores_of_ranks_keep_no_quota():
    (fault,) = quota_faults(QuotaConfig(storage=4), StorageConfig(backend="file"), 2)
    assert "needs one rank, not 2" in fault
    assert not list(quota_faults(QuotaConfig(device=4), StorageConfig(backend="file"), 2))


async def test_a_store_without_quotas_refuses_one_while_the_cache_runs():
    async with opened() as cache:
        with pytest.raises(StoreUnsupported, match="keeps no quota of a salt"):
            await cache.set_quota("a", device=4, storage=4)
        assert cache.tenants().named == {}
        await settle(cache)


# -- faults


@pytest.mark.parametrize("quota", [{"storage": 2}, {"salts": {"a": {"storage": 2}}}])
async def test_flush_only_ignores_a_quota_of_the_store_as_it_does_the_store(tmp_path, quota):
    """A variable switches to this mode: the settings of the store stay as they are."""
    file = {"backend": "file", "directory": str(tmp_path), "capacity_blocks": 8}
    flush = {"mode": "flush_only"}
    async with opened(storage=file, quota=quota, flush=flush) as cache:
        await use(cache, 1, salt="a")
        assert cache.tenants().others.storage_blocks is None
        with pytest.raises(StoreUnsupported):
            await cache.set_quota("a", storage=1)
        await settle(cache)
