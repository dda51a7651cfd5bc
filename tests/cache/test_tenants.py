"""Statistics by salt, through the public API."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import msgspec
import pytest

from kvactors.observe.http_endpoint import serve_metrics
from kvactors.observe.prometheus import CacheMetrics
from kvactors.observe.statistics import SUMMED
from kvactors.testing.loop import simulate
from tests.cache.test_degraded import fail
from tests.cache.test_quotas import held, hosted, settle, tokens_of, use
from tests.cache.test_sleep import HOST
from tests.observe.test_http_endpoint import call, get
from tests.support.cache import opened

SALTS = (None, "named", "first", "second", "")
COUNTED = ("requests", "blocks_looked_up", "device_hits", "host_hits")


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


class Model:
    """Counts by salt of what the calls of a client answer."""

    def __init__(self):
        self.counts = {salt: Counter() for salt in SALTS}

    async def request(self, cache, rng, number):
        salt, blocks = rng.choice(SALTS), rng.randint(1, 3)
        tokens = [*tokens_of(rng.randint(1, 4), blocks), 1]
        lease = await cache.acquire(f"r{number}", tokens, salt=salt)
        await lease.wait_ready()
        seen = self.counts[salt]
        seen["requests"] += 1
        seen["blocks_looked_up"] += blocks
        seen["device_hits"] += lease.hits.device
        seen["host_hits"] += lease.hits.host
        if rng.random() < 0.3:
            await (await lease.fork()).finish()
        await lease.finish(len(tokens) if rng.random() < 0.9 else 0)

    def forget(self, salt):
        self.counts[None] += self.counts[salt]
        self.counts[salt].clear()

    def check(self, cache):
        found = entries(cache)
        for salt, counts in self.counts.items():
            if salt in found:
                assert {name: getattr(found[salt], name) for name in COUNTED} == {
                    name: counts[name] for name in COUNTED
                }, salt
                on_device = sum(held(cache, number, salt=salt, blocks=3) for number in range(1, 5))
                assert found[salt].device_blocks == on_device
            else:
                assert not counts["requests"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("host", [None, HOST])
def test_counts_are_those_of_a_model_across_restarts_and_clears(seed, host):
    async def main():
        rng, model = random.Random(seed), Model()
        quota = {"device": 6, "salts": {"named": {"device": 3, "host": 2}}}
        async with opened(device=12, inline=True, host=host, quota=quota) as cache:
            for number in range(60):
                await model.request(cache, rng, number)
                await cache.wait_idle()
                model.check(cache)
                if rng.random() < 0.1:
                    before = entries(cache)
                    call = rng.choice(["index", "evictor", "clear", "clear salt", "sleep"])
                    if call == "clear":
                        await cache.clear()
                    elif call == "clear salt":
                        salt = rng.choice(SALTS[1:])
                        await cache.clear(salt=salt)
                        if salt != "named" and salt in before:
                            model.forget(salt)
                            assert salt not in entries(cache)
                            del before[salt], before[None]
                    elif call == "sleep":
                        await cache.sleep()
                        await cache.wake()
                    else:
                        await fail(cache, call, 1)
                        await cache.wait_idle()
                    after = entries(cache)
                    for salt, was in before.items():
                        for name in SUMMED:
                            now, then = getattr(after[salt], name), getattr(was, name)
                            # A sleep evicts all blocks, first those of salts above their quota.
                            assert now >= then if call == "sleep" else now == then, (call, name)
            await settle(cache)

    simulate(main)


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
