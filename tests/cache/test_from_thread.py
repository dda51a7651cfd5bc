"""`FromThread` and its lease mirror `KVCache` and `Lease`: names, parameters, kinds and defaults."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.cache import FromThread, KVCache
from kvactors.decode_batch import Step
from kvactors.errors import LeaseEnded
from kvactors.from_thread import ThreadLease
from kvactors.lease import Lease
from tests.support.cache import BLOCK, opened, prompt

MIRRORS = ((KVCache, FromThread), (Lease, ThreadLease))
OWN = {"close", "from_thread", "system"}
"""Parts of an open cache that only its loop uses."""
ATTRIBUTES = {
    KVCache: {"block_size", "system"},
    Lease: {"request_id", "cached_tokens", "pending", "num_tokens", "pinned_blocks"},
}
"""Public attributes that the constructors set."""


def public(owner):
    return {name for name in dir(owner) if not name.startswith("_")} | ATTRIBUTES.get(owner, set())


async def test_the_attributes_are_those_of_the_objects():
    async with opened() as cache, await cache.acquire("a", [1]) as lease:
        for made in (cache, lease):
            found = {name for name in vars(made) if not name.startswith("_")}
            assert found == ATTRIBUTES[type(made)]


@pytest.mark.parametrize(("owner", "mirror"), MIRRORS)
def test_every_public_name_is_mirrored(owner, mirror):
    assert public(mirror) == public(owner) - OWN


async def test_a_step_that_is_late_for_its_thread_ends_the_leases(monkeypatch):
    """The answer comes to a thread that has given up."""
    original = FromThread._call

    def late(self, work, deadline, lost=None):
        result = original(self, work, deadline, lost)
        if lost is not None and isinstance(result, list):
            self._schedule(lambda: lost(result))
        return result

    monkeypatch.setattr(FromThread, "_call", late)
    async with opened(device=8) as cache:

        def work():
            calls = cache.from_thread
            leases = [calls.acquire(f"{n}", prompt(n, 1)) for n in range(2)]
            leases[1].abandon()
            first, second = calls.step([Step(one, [7], BLOCK) for one in leases])
            assert first.error is None
            assert isinstance(second.error, LeaseEnded)
            with pytest.raises(LeaseEnded):
                leases[0].extend([1])

        await asyncio.to_thread(work)
