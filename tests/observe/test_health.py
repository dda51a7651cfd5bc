"""`cache.health()`: since when a condition holds."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvactors.data_plane.local import LocalPlane
from kvactors.errors import StoreError
from kvactors.storage.attempts import FAILURES
from kvactors.testing.loop import simulate
from tests.support.cache import opened

SECONDS = 30.0
STORE = {"backend": "memory"}


async def refuse(_generation=0):
    raise OSError("no")


async def fail_writes(cache, _patch):
    for _ in range(FAILURES):
        cache.system.store.attempts.writes.failed("no")


async def fail_a_clear(cache, patch):
    patch.setattr(cache.system.backend, "clear", refuse)
    with pytest.raises(StoreError):
        await cache.clear(storage=True)


async def leave_a_clear_pending(cache, patch):
    patch.setattr(cache.system.backend, "clear_pending", True)


async def break_the_copies(_cache, patch):
    patch.setattr(LocalPlane, "trouble", "no")


@pytest.mark.parametrize(
    ("begin", "recorded"),
    [
        (fail_writes, True),
        (fail_a_clear, True),
        (leave_a_clear_pending, False),
        (break_the_copies, False),
    ],
)
def test_since_is_when_a_condition_began_or_was_first_found(begin, recorded, monkeypatch):
    async def main():
        async with opened(inline=True, storage=STORE) as cache:
            assert cache.health() == ("ok", ())
            with monkeypatch.context() as patch:
                await begin(cache, patch)
                if not recorded:
                    assert cache.health().status == "degraded"
                for seconds in (SECONDS, 2 * SECONDS):
                    await asyncio.sleep(SECONDS)
                    (reason,) = cache.health().reasons
                    assert time.time() - reason.since == pytest.approx(seconds, abs=5)
            if begin is fail_a_clear:
                await cache.clear(storage=True)
            cache.system.store.attempts.writes.worked()
            assert cache.health() == ("ok", ())
            if begin is not fail_a_clear:  # a later condition of the same kind has a new time
                with monkeypatch.context() as patch:
                    await begin(cache, patch)
                    (reason,) = cache.health().reasons
                    assert time.time() - reason.since == pytest.approx(0, abs=5)
                cache.system.store.attempts.writes.worked()

    simulate(main)
