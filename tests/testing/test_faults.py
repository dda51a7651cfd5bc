"""A faulty sink or store without a fault is the one that it is around."""

from __future__ import annotations

import inspect

import pytest

from kvactors.device.arena import Arena
from kvactors.errors import StoreUnavailable
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.identity import Lineage
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.storage.backend import SlotViews
from kvactors.storage.file.store import FileBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.faults import Fault, FaultyBackend, FaultySink


def members(contract: type) -> set[str]:
    """Public methods and attributes that a contract has."""
    found = {name for one in contract.__mro__[:-1] for name in vars(one)}
    found |= {name for one in contract.__mro__[:-1] for name in inspect.get_annotations(one)}
    return {name for name in found if not name.startswith("_")}


def test_every_member_of_a_sink_is_passed_on():
    sink = FaultySink(MemorySink(MemorySinkConfig(name="m"), 4))
    own = set(vars(FaultySink)) | set(vars(sink))
    of_the_outer = {"call", "turn", "on_reset"}
    assert members(Sink) - own == of_the_outer, "the notifier's, about calls of the outer sink"


@pytest.fixture
async def faulty(tmp_path):
    store = FaultyBackend(FileBackend(tmp_path, bytes(32), 8, 4, block_size=1))
    arena = Arena(4, 8)
    await store.open()
    await store.attach(arena)
    yield store, arena
    await store.close()
    arena.close()


async def test_the_paths_of_a_store_are_read_through_it(faulty):
    store, arena = faulty
    lineage = Lineage(b"P" * 32, (7).to_bytes(4, "little"))
    await store.write([lineage.block_hash()], SlotViews(arena, [0]), lambda: False, [lineage])
    assert store.keeps_lineages
    store.begin_paths()
    found = []
    while (parts := await store.next_paths(8)) is not None:
        found += parts
    assert [part.parent for part in found] == [b"P" * 32]
    store.end_paths()


async def test_objects_that_left_a_store_are_reported_through_it(faulty):
    store, arena = faulty
    keys = [bytes([number]) * 32 for number in range(6)]
    for number, key in enumerate(keys):
        await store.write([key], SlotViews(arena, [number % 4]), lambda: False)
    assert set(store.take_removed()) == set(keys[:2])
    assert store.generation == 0
    await store.clear()
    assert store.generation == 1


@pytest.mark.parametrize(
    ("kind", "read", "written"),
    [
        ("store_down", Outcome.UNAVAILABLE, Outcome.UNAVAILABLE),
        ("disk_full", Outcome.OK, Outcome.NO_SPACE),
    ],
)
async def test_a_fault_keeps_calls_from_the_store(faulty, kind, read, written):
    store, arena = faulty
    kept, new = bytes([1]) * 32, bytes([2]) * 32
    await store.write([kept], SlotViews(arena, [0]), lambda: False)
    await store.inject(Fault(kind))
    report = await store.read([kept], [arena.view(1)], lambda: False)
    assert list(report.outcomes) == [read]
    report = await store.write([new], [arena.view(0)], lambda: False)
    assert list(report.outcomes) == [written]
    assert not store.holds(new)
    if kind != "store_down":
        assert await store.ask([kept], lambda: False) == 1
        return
    with pytest.raises(StoreUnavailable):
        await store.ask([kept], lambda: False)


async def test_a_store_refuses_faults_of_other_seams(faulty):
    store, _ = faulty
    for kind in ("object_lost", "sink_down", "rank_cut"):
        with pytest.raises(ValueError, match=f"{kind} is no fault of this store"):
            await store.inject(Fault(kind))
