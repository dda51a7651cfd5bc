"""Back ends behind one contract, and real files with every fault of the table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.config import StorageConfig
from kvactors.errors import ConfigError, StoreError
from kvactors.storage.backends import FileBackend, MemoryBackend, make_backend
from kvactors.storage.breaker import Breaker
from kvactors.storage.catalog import Catalog
from kvactors.storage.messages import Outcome

SIZE = 5000
PRINT = bytes(range(32))


def key(i: int) -> bytes:
    return i.to_bytes(4, "big") + bytes(28)


def data(i: int) -> bytes:
    return bytes([i % 251]) * SIZE


def never() -> bool:
    return False


@pytest.fixture(params=["memory", "file"])
async def store(request, tmp_path):
    backend = MemoryBackend(PRINT, SIZE, 8) if request.param == "memory" else FileBackend(tmp_path, PRINT, SIZE, 8)
    await backend.open()
    yield backend
    await backend.close()


async def put(store, *numbers, expired=never):
    return await store.write([key(i) for i in numbers], [memoryview(data(i)) for i in numbers], expired)


async def get(store, *numbers, expired=never):
    into = [memoryview(bytearray(SIZE)) for _ in numbers]
    report = await store.read([key(i) for i in numbers], into, expired)
    for i, outcome, view in zip(numbers, report.outcomes, into, strict=True):
        if outcome == Outcome.OK:
            assert bytes(view) == data(i)
    return list(report.outcomes)


async def test_what_was_written_is_read_and_results_are_per_key(store):
    assert list((await put(store, 1, 2)).outcomes) == [Outcome.OK] * 2
    assert list((await put(store, 2, 3)).outcomes) == [Outcome.EXISTS, Outcome.OK]
    assert await get(store, 1, 9, 3) == [Outcome.OK, Outcome.MISS, Outcome.OK]
    assert store.probe([key(1), key(2), key(9), key(3)]) == 2
    assert set(store.keys()) == {key(1), key(2), key(3)}
    await store.clear()
    assert store.keys() == []
    assert await get(store, 1) == [Outcome.MISS]


async def test_capacity_evicts_the_least_recently_used_and_reports_it(store):
    await put(store, *range(8))
    store.probe([key(0)])
    report = await put(store, 8, 9)
    assert report.evicted == [key(1), key(2)]
    assert await get(store, 0, 1) == [Outcome.OK, Outcome.MISS]
    assert list((await put(store, *range(20, 30))).outcomes)[:2] == [Outcome.NO_SPACE] * 2


async def test_a_deadline_leaves_the_rest_late(store):
    assert list((await put(store, 1, expired=lambda: True)).outcomes) == [Outcome.LATE]
    assert store.keys() == []
    await put(store, 1)
    assert await get(store, 1, expired=lambda: True) == [Outcome.LATE]


async def test_taking_frees_capacity_before_the_next_write(store):
    await put(store, *range(8))
    store.take([key(0), key(1)])
    assert (await put(store, 10, 11)).evicted == []
    assert await get(store, 0) == [Outcome.OK], "taken, but still to be read"


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "payload bit":
        raw[-1] ^= 1
    elif how == "header bit":
        raw[20] ^= 4
    elif how == "cut in half":
        raw = raw[: len(raw) // 2]
    elif how == "empty":
        raw = bytearray()
    elif how == "too long":
        raw += b"x"
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["payload bit", "header bit", "cut in half", "empty", "too long"])
async def test_a_damaged_file_is_a_counted_miss_and_goes(tmp_path, how):
    store = FileBackend(tmp_path, PRINT, SIZE)
    await store.open()
    await put(store, 1, 2)
    damage(store.path(key(1)), how)
    assert await get(store, 1, 2) == [Outcome.CORRUPT, Outcome.OK]
    assert store.statistics().corrupt == 1
    assert not store.path(key(1)).exists()
    assert store.keys() == [key(2)]


async def test_another_keys_file_under_this_name_is_corrupt(tmp_path):
    store = FileBackend(tmp_path, PRINT, SIZE)
    await store.open()
    await put(store, 1, 2)
    store.path(key(2)).replace(store.path(key(1)))
    assert await get(store, 1, 2) == [Outcome.CORRUPT, Outcome.MISS]


async def test_a_restart_finds_whole_files_cleans_up_and_obeys_a_smaller_capacity(tmp_path):
    store = FileBackend(tmp_path, PRINT, SIZE)
    await store.open()
    await put(store, 1)
    await put(store, 2)
    await put(store, 3)
    for i in (1, 2, 3):
        os.utime(store.path(key(i)), (i, i))
    stale = store.path(key(1)).with_suffix(".99-0.tmp")
    stale.write_bytes(b"half")
    other = FileBackend(tmp_path, bytes(32), SIZE)
    await other.open()
    await put(other, 7)
    again = FileBackend(tmp_path, PRINT, SIZE, 2)
    await again.open()
    assert again.keys() == [key(2), key(3)]
    assert not stale.exists()
    assert not store.path(key(1)).exists()
    assert await get(again, 2, 3) == [Outcome.OK, Outcome.OK]
    assert await get(other, 7) == [Outcome.OK]


async def test_a_directory_deleted_behind_its_back(tmp_path):
    import shutil

    store = FileBackend(tmp_path / "store", PRINT, SIZE)
    await store.open()
    await put(store, 1)
    shutil.rmtree(tmp_path / "store")
    assert await get(store, 1) == [Outcome.MISS]
    assert store.keys() == []
    assert list((await put(store, 1)).outcomes) == [Outcome.OK]


@pytest.mark.parametrize(("number", "outcome"), [(28, Outcome.NO_SPACE), (30, Outcome.UNAVAILABLE)])
async def test_a_full_or_read_only_disk_leaves_nothing_behind(tmp_path, monkeypatch, number, outcome):
    store = FileBackend(tmp_path, PRINT, SIZE)
    await store.open()

    def refuse(*_args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "writev", refuse)
    assert list((await put(store, 1)).outcomes) == [outcome]
    assert store.keys() == []
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


async def test_a_store_that_cannot_be_opened_is_an_error_at_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError):
        await FileBackend(tmp_path / "file", PRINT, SIZE).open()


def test_back_ends_by_name():
    assert make_backend(StorageConfig(), PRINT, SIZE) is None
    with pytest.raises(ConfigError, match="directory"):
        make_backend(StorageConfig(backend="file"), PRINT, SIZE)


async def test_the_breaker_opens_waits_and_tries_once():
    breaker = Breaker(failures=2, pause=0.05)
    breaker.saw(False)
    assert breaker.closed()
    breaker.saw(False)
    assert not breaker.closed()
    assert breaker.state() == "open"
    import anyio

    await anyio.sleep(0.06)
    assert breaker.state() == "half open"
    assert breaker.closed()
    assert not breaker.closed()
    breaker.saw(True)
    assert breaker.state() == "closed"


@given(
    st.integers(1, 5), st.lists(st.one_of(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 9)), max_size=30)
)
def test_the_catalog_is_an_exact_lru(capacity, history):
    catalog, model = Catalog(capacity), []
    for step in history:
        if isinstance(step, int):
            catalog.remove([key(step)])
            model = [k for k in model if k != key(step)]
            continue
        batch = list(dict.fromkeys(key(i) for i in step))[-capacity:]
        admission = catalog.admit([key(i) for i in step])
        model = [k for k in model if k not in batch] + batch
        gone, model = model[: max(0, len(model) - capacity)], model[-capacity:]
        assert admission.evicted == gone
        assert catalog.keys() == model
