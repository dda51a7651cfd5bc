"""Copies between tensors and host slots in native threads."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvactors import CacheClosed, DeviceError, LayoutError
from kvactors.tier_cache import CopyWorker, SlotMemory
from tests.tier_cache.helpers import in_child

LIMIT = 60.0


def make_tensors(rows: int, *widths: int) -> list[np.ndarray]:
    noise = np.random.default_rng(0)
    return [noise.integers(0, 255, (rows, width), np.uint8) for width in widths]


def block(tensors: list[np.ndarray], number: int) -> bytes:
    return b"".join(tensor[number].tobytes() for tensor in tensors)


@pytest.mark.parametrize("inline_bytes", [0, 1 << 30])
def test_stores_and_loads_move_every_byte(inline_bytes):
    tensors = make_tensors(16, 100, 7, 4096)
    memory = SlotMemory(8, 5000)
    worker = CopyWorker(tensors, memory, inline_bytes=inline_bytes)
    worker.submit_store("store", [3, 15, 0], [1, 7, 2])
    assert worker.wait(["store"], LIMIT)
    (done,) = worker.get_finished()
    assert (done.job, done.stored, done.nbytes) == ("store", True, 3 * 4203)
    assert bytes(memory.view(7)[:4203]) == block(tensors, 15)
    assert bytes(memory.view(7)[4203:]) == bytes(797), "bytes behind the block were written"
    worker.submit_load("load", [4, 5], [2, 1])
    assert worker.wait(["load", "load"], LIMIT)
    assert [one.job for one in worker.get_finished()] == ["load"]
    assert block(tensors, 4) == block(tensors, 0)
    assert block(tensors, 5) == block(tensors, 3)
    assert worker.in_flight == 0
    worker.shutdown()
    worker.shutdown()
    assert worker.get_finished() == []
    with pytest.raises(CacheClosed):
        worker.submit_store("store", [0], [0])


@pytest.mark.parametrize("inline_bytes", [0, 1 << 30])
def test_strided_tensors_and_several_blocks_in_a_slot_of_two_ranks(inline_bytes):
    packed = make_tensors(8, 300)[0]
    tensors = [packed[:, :100], packed[:, 150:250]]
    memory = SlotMemory(4, 2 * 3 * 200)
    ranks = [
        CopyWorker(tensors, memory, offset=600 * rank, blocks_per_slot=3, inline_bytes=inline_bytes)
        for rank in range(2)
    ]
    before = packed.copy()
    ranks[1].submit_store(0, [2, 7], [3 * 2 + 1, 3 * 2 + 2])
    assert ranks[1].wait([0], LIMIT)
    row = bytes(memory.view(2))
    assert row[:800] == bytes(800)
    assert row[800:1000] == block(tensors, 2)
    assert row[1000:1200] == block(tensors, 7)
    ranks[1].submit_load(1, [0], [3 * 2 + 2])
    assert ranks[1].wait([1], LIMIT)
    assert block(tensors, 0) == block(tensors, 7)
    assert (packed[1:] == before[1:]).all()
    assert (packed[0, 100:150] == before[0, 100:150]).all(), "bytes of another tensor were written"
    for rank in ranks:
        rank.shutdown()


def test_a_name_in_flight_is_not_given_twice():
    worker = CopyWorker(make_tensors(4, 64), SlotMemory(2, 64))
    worker.submit_store("job", [], [])
    with pytest.raises(ValueError, match="in flight"):
        worker.submit_store("job", [0], [0])
    assert [one.nbytes for one in worker.get_finished()] == [0]
    worker.shutdown()


def test_tensors_that_do_not_fit_are_refused():
    memory = SlotMemory(2, 64)
    good = make_tensors(4, 32)[0]
    for tensors in ([], [good, good, good], [good, make_tensors(5, 32)[0]]):
        with pytest.raises(LayoutError):
            CopyWorker(tensors, memory)
    for tensors in ([object()], [np.zeros((4, 8, 8), np.uint8)[:, :, :4]], [np.zeros((), np.int8)]):
        with pytest.raises(DeviceError):
            CopyWorker(tensors, memory)
    with pytest.raises(LayoutError):
        CopyWorker([good], memory, offset=40)
    with pytest.raises(LayoutError):
        CopyWorker([good], memory, blocks_per_slot=3)


def test_a_tensor_that_moved_is_noticed():
    tensors = make_tensors(4, 64)
    worker = CopyWorker(tensors, SlotMemory(2, 64))
    tensors[0].resize((400, 64), refcheck=False)
    with pytest.raises(DeviceError, match="moved"):
        worker.submit_store("job", [0], [0])
    worker.shutdown()


@pytest.mark.parametrize("threads", [1, 3])
def test_many_copies_of_every_size_with_waits_of_other_threads(threads):
    noise = random.Random(1)
    tensors = make_tensors(64, 64 << 10, 192)
    expected = [block(tensors, i) for i in range(64)]
    memory = SlotMemory(64, (64 << 10) + 192)
    worker = CopyWorker(tensors, memory, threads=threads, inline_bytes=0)
    done: list[object] = []
    waits: list[bool] = []

    def watch(job: int) -> None:
        waits.append(worker.wait([job], LIMIT))

    watchers = []
    for job in range(200):
        count = noise.randint(1, 64)
        numbers = noise.sample(range(64), count)
        worker.submit_store(job, numbers, numbers)  # block i is always in slot i
        if job % 20 == 0:
            watchers.append(threading.Thread(target=watch, args=(job,)))
            watchers[-1].start()
        done += worker.get_finished()
    assert worker.wait(range(200), LIMIT)
    for watcher in watchers:
        watcher.join(LIMIT)
    done += worker.get_finished()
    assert sorted(one.job for one in done) == list(range(200))  # type: ignore[attr-defined]
    assert waits == [True] * 10
    worker.submit_store("all", list(range(64)), list(range(64)))
    worker.shutdown()  # ends the submitted jobs
    assert [bytes(memory.view(i)) for i in range(64)] == expected


def test_a_child_of_a_worker_in_use_gets_an_error():
    worker = CopyWorker(make_tensors(4, 64), SlotMemory(2, 64), inline_bytes=0)
    worker.submit_store("job", [0], [0])
    assert worker.wait(["job"], LIMIT)

    def use() -> None:
        with pytest.raises(CacheClosed):
            worker.submit_store("other", [0], [0])
        worker.shutdown()

    assert in_child(use)
    worker.shutdown()
