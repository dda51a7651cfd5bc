"""A view that holds no object is an outcome of its key, and its memory is not used."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.storage.file.store import FileBackend
from kvactors.storage.local_store import unfit_views
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome

SIZE = 8192
KEYS = [bytes([i]) * 32 for i in range(6)]
OK, BAD = Outcome.OK, Outcome.REFUSED


def never() -> bool:
    return False


@pytest.fixture(params=["file", "memory"])
async def store(request, tmp_path):
    if request.param == "file":
        made = FileBackend(tmp_path, bytes(32), SIZE, 4)
    else:
        made = MemoryBackend(bytes(32), SIZE, 4)
    await made.open()
    yield made
    await made.close()


def wrong_views(memory: np.ndarray) -> list[memoryview]:
    """Empty, short, long, and one with gaps. memory: of three objects."""
    data, size = memory.data, memory.nbytes // 3
    return [data[:0], data[: size - 1], data[: size + 1], data[: 2 * size : 2]]


async def test_unfit_views_are_not_written_and_evict_nothing(store):
    memory = np.full(3 * SIZE, 7, np.uint8)
    good = memory[:SIZE].data
    report = await store.write(KEYS[:4], [good] * 4, never)
    assert report.outcomes == bytes([OK] * 4)
    report = await store.write(KEYS[4:5] * 4, wrong_views(memory), never)
    assert (report.outcomes, report.evicted) == (bytes([BAD] * 4), [])
    report = await store.write(KEYS[4:6], [good], never)
    assert report.outcomes == bytes([OK, BAD])
    assert not store.holds(KEYS[5])
    assert store.count() == 4


async def test_unfit_views_are_not_read_into(store):
    memory = np.full(3 * SIZE, 7, np.uint8)
    await store.write(KEYS[:1], [memory[:SIZE].data], never)
    target = np.zeros(3 * SIZE, np.uint8)
    frozen = memoryview(bytes(SIZE))
    report = await store.read(KEYS[:1] * 5, [*wrong_views(target), frozen], never)
    assert (report.outcomes, report.gone) == (bytes([BAD] * 5), [])
    assert not target.any(), "memory behind a view was written"
    report = await store.read([KEYS[0], KEYS[0]], [target[:0].data, target[:SIZE].data], never)
    assert report.outcomes == bytes([BAD, OK])
    assert (target[:SIZE] == 7).all()
    assert not target[SIZE:].any()


async def test_a_key_with_a_fit_and_an_unfit_view_is_stored(store):
    good = memoryview(bytes(SIZE))
    report = await store.write([KEYS[0], KEYS[0]], [good, good[:1]], never)
    assert report.outcomes == bytes([OK, BAD])
    assert store.holds(KEYS[0])


def test_missing_views_are_unfit():
    assert unfit_views([memoryview(b"four")], 3, 4, writable=False) == {1, 2}
    assert unfit_views([memoryview(b"four")], 1, 4, writable=True) == {0}
