"""A file store of many slabs leaves descriptors to the process, and works with those that it holds
and those that it opens for a call."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvactors.storage.file import layout
from kvactors.storage.file.store import own_bytes
from kvactors.storage.messages import Outcome
from tests.storage.helpers import MISS, OK, SIZE, opened, whole


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def few_descriptors(more: int):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def held(monkeypatch):
    """Slabs that stay open."""
    monkeypatch.setattr(layout, "HELD", 4)
    return 4


async def test_a_store_that_began_with_one_object_grows_with_few_descriptors(tmp_path, held):
    async with opened(tmp_path, capacity=1) as bench:
        await bench.put(0)
    async with opened(tmp_path, capacity=60, durability="synced") as bench:
        with few_descriptors(30):
            assert set(await bench.put(*range(60))) <= {OK, Outcome.EXISTS}
            assert await bench.get(*range(60)) == [OK] * 60
        assert len(bench.store.files.slabs) == 60
        whole(bench.store)
    with few_descriptors(30):
        async with opened(tmp_path, capacity=60) as bench:
            assert await bench.get(*range(60)) == [OK] * 60


async def test_slabs_beyond_those_held_are_reckoned_shrunk_and_closed(tmp_path, held):
    before = descriptors()
    async with opened(tmp_path, capacity=1) as bench:
        await bench.put(0)
    async with opened(tmp_path, capacity=10) as bench:
        await bench.put(*range(10))
        assert own_bytes(bench.store.files) >= 10 * SIZE
        assert (
            own_bytes(bench.store.files)
            == 10 * (bench.store.files.folder / "slab-0009").stat().st_blocks * 512
        )
        (bench.store.files.folder / "slab-0009").unlink()
        answers = await bench.get(*range(10))
        assert sorted(answers)[:9] == [OK] * 9
        assert len(list(bench.store.files.folder.glob("slab-*"))) == 9, (
            "a slab that was deleted is not made anew by a read"
        )
    async with opened(tmp_path, capacity=2) as bench:
        assert len(list(bench.store.files.folder.glob("slab-*"))) == len(bench.store.files.slabs)
    assert descriptors() == before


async def test_a_file_system_that_refuses_direct_io_later_is_used_through_the_page_cache(
    tmp_path, held
):
    async with opened(tmp_path, capacity=1) as bench:
        await bench.put(0)
    async with opened(tmp_path, capacity=10) as bench:
        await bench.put(*range(10))
        if bench.store.files.direct:
            assert bench.store.files.buffered_from_now_on()
        assert await bench.get(*range(10)) == [OK] * 10
        assert await bench.get(99) == [MISS]
