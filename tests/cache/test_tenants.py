"""Statistics by salt, through the public API."""

from __future__ import annotations

import asyncio
import json

import msgspec

from kvactors.observe.http_endpoint import serve_metrics
from kvactors.observe.prometheus import CacheMetrics
from kvactors.observe.statistics import SUMMED
from tests.cache.test_degraded import fail
from tests.cache.test_quotas import hosted, settle, use
from tests.observe.test_http_endpoint import call, get
from tests.support.cache import opened


def entries(cache):
    """Every entry by salt, None for the others. They add up to the statistics of the cache."""
    tenants, whole = cache.tenants(), cache.statistics()
    found = {**tenants.named, **tenants.unnamed, None: tenants.others}
    sums = {name: sum(getattr(one, name) for one in found.values()) for name in SUMMED}
    assert all(
        value >= 0 for one in found.values() for value in msgspec.structs.astuple(one) if value
    )
    assert sums == {
        **{name: getattr(whole, name) for name in SUMMED[:5]},
        "device_quota_evictions": whole.prefix.quota_evictions,
        "host_quota_evictions": whole.host.quota_evictions,
        "storage_quota_evictions": whole.store.quota_evictions if whole.store else 0,
    }
    return found


async def test_evictions_of_a_quota_are_those_of_its_salt():
    quota = {"device": 4, "salts": {"own": {"device": 2, "host": 2}}}
    async with opened(device=8, host={"slots": 4}, quota=quota) as cache:
        await use(cache, 1, salt="quiet")
        for number in range(2, 8):
            await use(cache, number, salt="noisy")
        for number in range(8, 12):
            await use(cache, number, salt="own")
        await settle(cache)
        found = entries(cache)
        assert found["quiet"].device_quota_evictions == 0
        assert found["noisy"].device_quota_evictions > 0
        assert found["own"].device_quota_evictions > 0
        assert found[None].device_quota_evictions == 0
        assert (found["quiet"].device_quota, found["quiet"].host_quota) == (4, None)
        assert (found["own"].device_quota, found["own"].host_quota) == (2, 2)
        assert found["own"].host_blocks == sum(
            hosted(cache, number, salt="own") for number in range(8, 12)
        )
        evicted = found["noisy"].device_quota_evictions
        await cache.clear()
        await fail(cache, "index", 1)
        await use(cache, 1, salt="quiet")
        await settle(cache)
        assert entries(cache)["noisy"].device_quota_evictions == evicted


async def test_at_most_1000_salts_without_a_quota_have_an_entry():
    async with opened(device=8, quota={"device": 4}) as cache:
        for number in range(1010):
            await use(cache, number % 7, salt=f"salt {number}", blocks=1)
        await use(cache, 1)
        assert len(cache.tenants().unnamed) == 1000
        others = entries(cache)[None]
        assert (others.requests, others.blocks_looked_up) == (11, 12)
        await cache.set_quota("salt 3", device=2)
        await use(cache, 1, salt="one more")
        await use(cache, 1, salt="no more")
        await cache.set_quota("salt 1005", device=3)
        await use(cache, 1, salt="salt 1005", blocks=1)
        tenants = cache.tenants()
        assert set(tenants.named) == {"salt 3", "salt 1005"}
        assert tenants.named["salt 1005"].requests == 1
        assert tenants.named["salt 3"].requests == 1
        assert "one more" in tenants.unnamed
        assert "no more" not in tenants.unnamed
        assert len(tenants.unnamed) == 1000
        await settle(cache)


async def test_only_salts_with_a_named_quota_are_shown_to_others():
    quota = {"device": 4, "salts": {'na"med': {"device": 2}}}
    async with opened(device=8, quota=quota) as cache, serve_metrics(cache, 0) as endpoint:
        await use(cache, 1, salt="secret")
        await use(cache, 2, salt='na"med')
        await cache.set_quota("later", host=3)
        _, _, metrics = await call(endpoint.port, get("/metrics"))
        _, _, statistics = await call(endpoint.port, get("/statistics"))
        assert b"secret" not in metrics + statistics
        found = json.loads(statistics)["tenants"]
        assert set(found) == {'na"med', "later"}
        assert found['na"med']["requests"] == 1
        assert (found["later"]["host_quota"], found["later"]["device_quota"]) == (3, None)
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in CacheMetrics(cache).collect()
            for sample in family.samples
            if "tenant" in sample.name
        }
        own = ("salt", 'na"med')
        assert samples["kvactors:tenant_requests_total", own] == 1
        assert samples["kvactors:tenant_blocks_looked_up_total", own] == 2
        assert samples["kvactors:tenant_blocks", own, ("tier", "device")] == 2
        assert samples["kvactors:tenant_quota_blocks", own, ("tier", "device")] == 2
        assert ("kvactors:tenant_quota_blocks", own, ("tier", "host")) not in samples
        answer = await asyncio.to_thread(cache.from_thread.tenants)
        assert answer == cache.tenants()
