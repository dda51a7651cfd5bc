"""Small pieces that are gathered on the device, and neighbours that are copied together, on the
stand-in driver. It finds uses of the same memory that no event orders."""

from __future__ import annotations

import asyncio
import ctypes

import numpy as np
import pytest

from kvactors.data_plane.base import Direction
from kvactors.data_plane.cuda import copies as cuda_copies
from kvactors.data_plane.cuda import copy_queue
from kvactors.data_plane.cuda import engine as cuda_engine
from kvactors.data_plane.cuda.copies import NEVER, Calibration, Choice
from kvactors.layout import DSALayout, GQALayout
from kvactors.tier_cache import CopyWorker, SlotMemory
from tests.support import cuda
from tests.support.cuda_stand import SMALL, standing, until

TO_HOST, TO_DEVICE = Direction.TO_HOST, Direction.TO_DEVICE
GATHERED = {"batch_from": 1 << 40, "stage_from": 0, "merge_from": 2}


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
async def test_a_batch_takes_the_halves_of_a_buffer_in_turn(fake, rows):
    """Blocks of 6 KiB, and halves for `rows` of them, each filled when its copy has ended."""
    nbytes = 2 * max(4096, rows * 6144)
    async with standing(fake, blocks=20, slots=20, staging_bytes=nbytes, **GATHERED) as stand:
        rng = np.random.default_rng(rows)
        await stand.there_and_back(
            rng.permutation(20)[:17].tolist(), rng.permutation(20)[:17].tolist()
        )
        found = stand.executor.statistics()
        assert found.staging_bytes == 2 * nbytes
        assert found.staged >= 2 * (17 // rows)
        assert found.launches == 0


async def test_a_block_of_scattered_pieces_leaves_the_device_by_one_copy(fake):
    layout = GQALayout(2, 2, 16, 16, "float16")
    async with standing(fake, layout, **GATHERED) as stand:
        for ids, slots, pieces in (([5], [3], 1), ([5, 1], [3, 7], 2), ([5, 1, 4], [3, 4, 5], 1)):
            before = fake.calls("pieces")
            assert await stand.executor.run(TO_HOST, ids, slots) == ()
            assert fake.calls("pieces") - before == pieces
            assert await stand.executor.run(TO_DEVICE, ids, slots) == ()
            assert fake.calls("pieces") - before == 2 * pieces
        assert stand.executor.statistics().rectangles == 0, "slots without gaps"


async def test_large_pieces_between_small_ones_go_by_themselves(fake):
    """DSA: keys of 41 KiB, indexers of 8 KiB, which are gathered and leave as rows with gaps."""
    options = {**GATHERED, "batch_from": 16 << 10, "merge_from": 3}
    layout = DSALayout(3, 64)
    async with standing(fake, layout, blocks=10, slots=10, **options) as stand:
        await stand.there_and_back([3, 4, 5, 6, 1, 9], [2, 3, 4, 5, 0, 7])
        found = stand.executor.statistics()
        assert found.staged == 2
        assert found.rectangles == 2 * (3 + 3), "3 keys on the device, 3 indexers in the buffer"


async def test_few_bytes_are_not_gathered(fake):
    options = {**GATHERED, "stage_from": 3 * SMALL.block_bytes}
    async with standing(fake, **options) as stand:
        await stand.there_and_back([1, 4], [2, 0])
        assert stand.executor.statistics().staged == 0
        assert stand.executor.statistics().launches == 2
        await stand.there_and_back([1, 4, 5], [2, 0, 3])
        assert stand.executor.statistics().staged == 2
        assert stand.executor.statistics().launches == 2


async def test_a_piece_larger_than_half_of_the_buffer_goes_directly(fake):
    layout = GQALayout(2, 1, 64, 160, "uint8")  # pieces of 10 KiB
    async with standing(fake, layout, staging_bytes=16 << 10, **GATHERED) as stand:
        await stand.there_and_back([1, 4, 5], [2, 0, 3])
        assert (stand.executor.statistics().staged, stand.executor.statistics().launches) == (0, 8)
    layout = GQALayout(4, 1, 64, 60, "uint8")  # of 3.75 KiB: a block does not fit, two pieces do
    async with standing(fake, layout, staging_bytes=16 << 10, **GATHERED) as stand:
        await stand.there_and_back([1, 4], [2, 0])
        assert (stand.executor.statistics().staged, stand.executor.statistics().launches) == (16, 0)


@pytest.mark.parametrize("nbytes", [0, 8191])
async def test_without_a_buffer_kernels_reach_the_host_themselves(fake, nbytes):
    async with standing(fake, staging_bytes=nbytes, **GATHERED) as stand:
        await stand.there_and_back([1, 4], [2, 0])
        found = stand.executor.statistics()
        assert (found.staged, found.launches, found.staging_bytes) == (0, 2, 0)
        assert fake.live("streams") == 3, "no streams for kernels"


async def test_pairs_beyond_the_row_numbers_take_another_half(fake, monkeypatch):
    monkeypatch.setattr(cuda_copies, "ROWS", 5)
    async with standing(fake, blocks=20, slots=20, **GATHERED) as stand:
        await stand.there_and_back(list(range(17)), list(range(3, 20)))
        assert stand.executor.statistics().staged == 2 * 4


@pytest.mark.parametrize("mixed", [False, True], ids=["gathered", "some directly"])
async def test_layers_arrive_one_by_one_from_the_buffer(fake, monkeypatch, mixed):
    monkeypatch.setattr(cuda_engine, "GROUP", 1)
    options = {**GATHERED, "staging_bytes": 16 << 10}
    layout = GQALayout(4, 2, 16, 16, "float16")
    if mixed:  # keys of 41 KiB by the copy engines, indexers of 8 KiB through the buffer
        layout = DSALayout(4, 64)
        options = {**options, "batch_from": 16 << 10, "staging_bytes": 32 << 10}
    async with standing(fake, layout, **options) as stand:
        stand.device.fill(range(8), stand.names)
        assert await stand.executor.run(TO_HOST, range(8), range(8)) == ()
        stand.device.fill(range(8), bytes(32 * 8))
        seen: list[int] = []
        assert await stand.executor.run(TO_DEVICE, range(8), range(8), seen.append) == ()
        assert seen[-1] == 4
        assert seen == sorted(set(seen))
        assert stand.wrong(range(8)) == []


async def test_a_layers_event_comes_after_its_kernel(fake, monkeypatch):
    """The event of a gathered layer is reached only when the kernel has brought the pieces from the
    buffer to their blocks."""
    monkeypatch.setattr(cuda_engine, "GROUP", 1)
    layout = GQALayout(2, 2, 16, 16, "float16")
    async with standing(fake, layout, **GATHERED) as stand:
        stand.device.fill([0], stand.name([0]))
        await stand.executor.run(TO_HOST, [0], [0])
        stand.device.fill([0], bytes(32))
        fake.gate(0)
        seen: list[int] = []
        running = asyncio.ensure_future(stand.executor.run(TO_DEVICE, [0], [0], seen.append))
        await until(lambda: fake.live("running") == 5)  # numbers, and a copy and a kernel a layer
        fake.gate(3)  # the numbers and both copies, or the first layer
        await asyncio.sleep(0.02)
        assert len(seen) <= 1
        fake.gate(-1)
        assert await running == ()
        assert seen[-1] == 2
        assert stand.wrong([0]) == []


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuEventRecord"])
async def test_a_failed_copy_is_settled_on_both_streams(fake, call):
    """An error after the kernel was launched: its blocks are free only when it has ended."""
    async with standing(fake, **GATHERED) as stand:
        fake.gate(0)
        waits = fake.calls("cuStreamSynchronize")
        fake.fail(call, 1)
        running = asyncio.ensure_future(stand.executor.run(TO_HOST, [1, 5], [2, 7]))
        await until(lambda: fake.calls("cuStreamSynchronize") > waits)
        await asyncio.sleep(0.01)
        assert not running.done(), "the gather still runs"
        fake.gate(-1)
        assert await running == (0, 1)


# -- without an event loop


def block(tensors, number: int) -> bytes:
    return b"".join(ctypes.string_at(t.address + number * t.shape[1], t.shape[1]) for t in tensors)


def worker_of(
    gpu, tensors, memory, monkeypatch, *, blocks_per_slot: int = 1, **options: int
) -> CopyWorker:
    choice = Choice(**{"batch_from": 1 << 40, "stage_from": 0, "merge_from": 2, **options})
    monkeypatch.setattr(copy_queue, "calibrate", lambda *_: Calibration(choice))
    return CopyWorker(tensors, memory, blocks_per_slot=blocks_per_slot, driver=gpu.driver)


@pytest.mark.parametrize(
    "options", [{}, {"stage_from": 512}, {"stage_from": NEVER}, {"batch_from": 64}]
)
def test_copies_in_the_order_of_their_submission(monkeypatch, options):
    """Stores to the same slots, gathered, directly, and by the copy engines, one after another."""
    with cuda.opened_gpu() as gpu:
        tensors = gpu.tensors(32, 100, 7, 48)
        memory = SlotMemory(32, 256)
        worker = worker_of(gpu, tensors, memory, monkeypatch, **options)
        gpu.fake.set("delay_us", 100)
        stores = [
            (list(range(k, k + count)), list(range(count)))
            for k, count in ((0, 12), (3, 2), (9, 8))
        ]
        for job, (blocks, slots) in enumerate(stores):
            worker.submit_store(job, blocks, slots, stream=gpu.stream)
        assert worker.wait([2], 60.0)
        assert {one.error for one in worker.get_finished()} == {""}
        for slot in range(12):
            number = next(b[slot] for b, s in reversed(stores) if slot in s)
            assert bytes(memory.view(slot)[:155]) == block(tensors, number)
        for job, slots in ((3, [0, 1, 2]), (4, [5, 6, 7, 8, 9, 10])):
            worker.submit_load(job, list(range(20, 20 + len(slots))), slots, stream=gpu.stream)
        assert worker.wait([4], 60.0)
        assert {one.error for one in worker.get_finished()} == {""}
        assert [block(tensors, 20 + i) for i in range(6)] == [
            bytes(memory.view(s)[:155]) for s in range(5, 11)
        ]
        worker.shutdown()


def test_whole_blocks_in_one_tensor_are_one_copy(monkeypatch):
    """Layers that follow one another in each block, as engines have them that offload."""
    with cuda.opened_gpu() as gpu:
        (packed,) = gpu.tensors(16, 512)
        layers = [
            cuda.GpuTensor(packed.address + 128 * i, (16, 128), "uint8", strides=(512, 1))
            for i in range(4)
        ]
        memory = SlotMemory(4, 4 * 512)
        worker = worker_of(gpu, layers, memory, monkeypatch, blocks_per_slot=4, batch_from=0)
        before = gpu.fake.calls("pieces")
        worker.submit_store("store", [3, 4, 5, 6, 9], [4, 5, 6, 7, 2], stream=gpu.stream)
        assert worker.wait(["store"], 60.0)
        assert gpu.fake.calls("pieces") - before == 2, "a run of four blocks, and one"
        assert bytes(memory.view(1)) == b"".join(block([packed], i) for i in (3, 4, 5, 6))
        assert bytes(memory.view(0))[1024:1536] == block([packed], 9)
        worker.shutdown()


def test_blocks_in_slots_with_gaps_are_one_rectangle(monkeypatch):
    with cuda.opened_gpu() as gpu:
        tensors = gpu.tensors(16, 64)
        memory = SlotMemory(16, 100)
        worker = worker_of(gpu, tensors, memory, monkeypatch, batch_from=0)
        worker.submit_store("store", [3, 4, 5, 6], [1, 2, 3, 4], stream=gpu.stream)
        assert worker.wait(["store"], 60.0)
        worker.submit_load("load", [9, 10, 11, 12], [1, 2, 3, 4], stream=gpu.stream)
        assert worker.wait(["load"], 60.0)
        assert gpu.fake.calls("cuMemcpy2DAsync") == 2
        assert gpu.fake.calls("cuMemcpyBatchAsync") == 0
        assert [bytes(memory.view(1 + i))[:64] for i in range(4)] == [
            block(tensors, 3 + i) for i in range(4)
        ]
        assert [block(tensors, 9 + i) for i in range(4)] == [
            block(tensors, 3 + i) for i in range(4)
        ]
        worker.shutdown()


def test_pieces_of_different_allocations_are_not_joined(monkeypatch):
    """A copy from one allocation into another one fails, even if their addresses follow one
    another."""
    with cuda.opened_gpu() as gpu:
        (packed,) = gpu.tensors(16, 512)
        halves = [
            cuda.GpuTensor(packed.address + 256 * i, (16, 256), "uint8", strides=(512, 1))
            for i in range(2)
        ]
        memory = SlotMemory(16, 512)
        bases = {packed.address: 1 << 40, packed.address + 256: 2 << 40}
        monkeypatch.setattr(type(gpu.driver), "allocation", lambda _, address: bases[address])
        worker = worker_of(gpu, halves, memory, monkeypatch, batch_from=0, merge_from=NEVER)
        before = gpu.fake.calls("pieces")
        worker.submit_store("store", [3, 4], [1, 2], stream=gpu.stream)
        assert worker.wait(["store"], 60.0)
        assert gpu.fake.calls("pieces") - before == 4
        assert bytes(memory.view(2)) == block([packed], 4)
        worker.shutdown()


@pytest.mark.parametrize("way", ["store", "load"])
def test_kernels_of_a_copy_begin_after_the_engines_work(monkeypatch, way):
    """The stand-in compares the kernel's memory with that of the engine's copy."""
    with cuda.opened_gpu() as gpu:
        tensors = gpu.tensors(4, 64, 32)
        memory = SlotMemory(4, 96)
        worker = worker_of(gpu, tensors, memory, monkeypatch)
        with gpu.driver.current(gpu.context):
            source = gpu.driver.read("cuMemHostAlloc", 64, 3)
            gpu.driver.call("cuMemcpyHtoDAsync", tensors[0].address, source, 64, gpu.stream)
        submit = worker.submit_store if way == "store" else worker.submit_load
        submit("job", [0, 1], [0, 1], stream=gpu.stream)
        assert worker.wait(["job"], 60.0)
        assert gpu.fake.live("races") == 0
        with gpu.driver.current(gpu.context):
            gpu.driver.call("cuStreamSynchronize", gpu.stream)
            gpu.driver.call("cuMemFreeHost", source)
        worker.shutdown()
