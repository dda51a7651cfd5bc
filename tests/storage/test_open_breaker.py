"""A store whose circuit breaker is open: nothing is read, written or lost."""

from __future__ import annotations

import pytest

from kvactors.device.arena import Arena
from kvactors.storage.attempts import FAILURES
from kvactors.storage.file.store import FileBackend
from kvactors.storage.guarded import CheckedBackend
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from tests.storage.helpers import OK, PRINT

SIZE = 64
KEYS = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture(params=["memory", "file"])
async def full_store(request, tmp_path):
    """A store of four objects, with four."""
    if request.param == "memory":
        store = CheckedBackend(MemoryBackend(PRINT, SIZE, 4), 60.0)
    else:
        store = CheckedBackend(FileBackend(tmp_path, PRINT, SIZE, 4), 60.0)
    arena = Arena(8, SIZE)
    await store.open()
    await store.attach(arena)
    report = await store.write_slots(KEYS[:4], arena, range(4), lambda: False)
    assert set(report.outcomes) == {OK}
    yield store, arena
    await store.close()
    arena.close()


async def test_a_refused_write_evicts_nothing(full_store):
    store, arena = full_store
    for _ in range(FAILURES):
        store.attempts.writes.failed()
    before = store.keys()
    report = await store.write_slots(KEYS[4:], arena, range(4, 8), lambda: False)
    assert report.outcomes == bytes([Outcome.UNAVAILABLE]) * 4
    assert report.evicted == []
    assert store.keys() == before
    assert store.inventory.take_removed() == []
    assert (store.statistics().evicted, store.statistics().unavailable) == (0, 4)


async def test_one_batch_tries_the_store_after_the_pause(full_store, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("kvactors.storage.attempts.now", lambda: clock[0])
    store, arena = full_store
    for _ in range(FAILURES):
        store.attempts.writes.failed()
    clock[0] = 6.0
    report = await store.write_slots(KEYS[4:6], arena, range(4, 6), lambda: False)
    assert set(report.outcomes) == {OK}, "the first batch after the pause is written"
    assert store.statistics().breaker == "closed"
    assert store.keys() == [KEYS[2], KEYS[3], KEYS[4], KEYS[5]]
