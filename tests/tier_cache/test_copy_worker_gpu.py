"""Copies between tensors of a GPU and host slots, on the stand-in driver."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from kvactors import CacheClosed, DeviceError, LayoutError
from kvactors.data_plane.cuda import copies, copy_queue
from kvactors.data_plane.cuda.driver import ABANDONED, CudaDriver, CudaError
from kvactors.tier_cache import CopyWorker, SlotMemory
from tests.support.cuda import EVERYTHING, Gpu, GpuTensor, PointerTensor, opened_gpu
from tests.tier_cache.helpers import in_child

LIMIT = 60.0
SHORT = 0.05
ILLEGAL, INVALID_HANDLE, OUT_OF_MEMORY, DESTROYED = 700, 400, 2, 709


@pytest.fixture
def gpu():
    with opened_gpu() as found:
        yield found


def block(tensors: list[Any], number: int) -> bytes:
    return b"".join(ctypes.string_at(t.address + number * t.shape[1], t.shape[1]) for t in tensors)


def ended(worker: CopyWorker, *jobs: str) -> dict[Any, str]:
    """The errors of jobs, by name."""
    assert worker.wait(jobs, LIMIT)
    return {one.job: one.error for one in worker.get_finished()}


@pytest.mark.parametrize("batch_from", [0, 64, 1 << 20], ids=["engines", "both", "kernel"])
@pytest.mark.parametrize("batched", [True, False], ids=["batches", "singles"])
def test_stores_and_loads_move_every_byte(gpu, batch_from, batched, monkeypatch):
    gpu.fake.set("no cuMemcpyBatchAsync", not batched)
    monkeypatch.setattr(copies, "BATCH_FROM", batch_from)
    driver = CudaDriver(gpu.fake.path)
    tensors = gpu.tensors(16, 100, 7, 4096)
    memory = SlotMemory(8, 5000)
    worker = CopyWorker(tensors, memory, driver=driver)
    worker.submit_store("store", [3, 15, 0], [1, 7, 2], stream=gpu.stream)
    assert worker.wait(["store"], LIMIT)
    (done,) = worker.get_finished()
    assert (done.job, done.stored, done.nbytes, done.error) == ("store", True, 3 * 4203, "")
    assert bytes(memory.view(7)[:4203]) == block(tensors, 15)
    assert bytes(memory.view(7)[4203:]) == bytes(797), "bytes behind the block were written"
    worker.submit_load("load", [4, 5], [2, 1], stream=0)
    assert ended(worker, "load") == {"load": ""}
    assert block(tensors, 4) == block(tensors, 0)
    assert block(tensors, 5) == block(tensors, 3)
    assert worker.in_flight == 0
    assert gpu.fake.calls("pageable") == 0, "the slots are not pinned"
    assert worker.shutdown()
    assert worker.shutdown()
    with pytest.raises(CacheClosed):
        worker.submit_store("store", [0], [0], stream=0)


@pytest.mark.parametrize("batch_from", [0, 1 << 20])
def test_strided_tensors_and_several_blocks_in_a_slot_of_two_ranks(gpu, batch_from, monkeypatch):
    monkeypatch.setattr(copies, "BATCH_FROM", batch_from)
    (packed,) = gpu.tensors(8, 300)
    strided = [
        GpuTensor(packed.address + start, (8, 100), "uint8", strides=(300, 1)) for start in (0, 150)
    ]
    memory = SlotMemory(4, 2 * 3 * 200)
    ranks = [
        CopyWorker(strided, memory, offset=600 * rank, blocks_per_slot=3, driver=gpu.driver)
        for rank in range(2)
    ]
    before = ctypes.string_at(packed.address, 2400)
    ranks[1].submit_store("store", [2, 7], [3 * 2 + 1, 3 * 2 + 2], stream=gpu.stream)
    assert ended(ranks[1], "store") == {"store": ""}
    row = bytes(memory.view(2))
    assert row[:800] == bytes(800)
    assert row[800:1000] == before[600:700] + before[750:850]
    assert row[1000:1200] == before[2100:2200] + before[2250:2350]
    ranks[0].shutdown()  # the other one's slots remain pinned
    ranks[1].submit_load("load", [0], [3 * 2 + 2], stream=gpu.stream)
    assert ended(ranks[1], "load") == {"load": ""}
    after = ctypes.string_at(packed.address, 2400)
    assert after[:100] + after[150:250] == before[2100:2200] + before[2250:2350]
    assert after[100:150] + after[250:] == before[100:150] + before[250:]
    assert gpu.fake.calls("pageable") == 0
    ranks[1].shutdown()


@pytest.mark.parametrize("by", ["stream", "default stream", "event"])
@pytest.mark.parametrize("way", ["store", "load"])
def test_a_copy_begins_after_the_engines_work(gpu, by, way):
    tensors = gpu.tensors(2, 64)
    memory = SlotMemory(2, 64)
    worker = CopyWorker(tensors, memory, driver=gpu.driver)
    stream = 0 if by == "default stream" else gpu.stream
    computed = threading.Event()

    def compute() -> None:
        computed.wait(LIMIT)
        if way == "store":
            ctypes.memset(tensors[0].address, 7, 64)
        else:
            seen.append(block(tensors, 0))

    seen: list[bytes] = []
    before = block(tensors, 0)
    memory.view(1)[:] = b"n" * 64
    gpu.work(stream, compute)
    where = {"event": gpu.record(stream)} if by == "event" else {"stream": stream}
    if way == "store":
        worker.submit_store("copy", [0], [0], **where)
    else:
        worker.submit_load("copy", [0], [1], **where)
    assert not worker.wait(["copy"], SHORT)
    assert worker.get_finished() == []
    computed.set()
    assert ended(worker, "copy") == {"copy": ""}
    if way == "store":
        assert bytes(memory.view(0)) == b"\x07" * 64
    else:
        assert seen == [before], "a block was overwritten while it was read"
        assert block(tensors, 0) == b"n" * 64
    worker.shutdown()


def test_a_stream_or_an_event_is_needed_on_a_gpu_and_only_there(gpu):
    worker = CopyWorker(gpu.tensors(2, 64), SlotMemory(2, 64), driver=gpu.driver)
    with pytest.raises(ValueError, match="needs the stream or the event"):
        worker.submit_store("job", [0], [0])
    assert worker.in_flight == 0
    worker.shutdown()
    host = CopyWorker([np.zeros((2, 64), np.uint8)], SlotMemory(2, 64))
    for where in ({"stream": 0}, {"event": 5}):
        with pytest.raises(ValueError, match="neither a stream nor an event"):
            host.submit_load("job", [0], [0], **where)
    host.shutdown()


def test_numbers_out_of_range_copy_nothing(gpu):
    memory = SlotMemory(2, 64)
    worker = CopyWorker(gpu.tensors(4, 64), memory, driver=gpu.driver)
    for blocks, slots in (([4], [0]), ([-1], [0]), ([0], [2]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(ValueError, match=r"range|length"):
            worker.submit_store("job", blocks, slots, stream=gpu.stream)
    assert bytes(memory.view(0)) == bytes(64)
    worker.submit_store("job", [], [], stream=gpu.stream)
    with pytest.raises(ValueError, match="in flight"):
        worker.submit_store("job", [0], [0], stream=gpu.stream)
    assert ended(worker, "job") == {"job": ""}
    worker.shutdown()


def test_tensors_of_other_memory_are_refused(gpu):
    good, other = gpu.tensors(4, 32, 32)
    memory = SlotMemory(2, 96)
    host = np.zeros((4, 32), np.uint8)
    gpu.fake.set("devices", 2)
    gpu.fake.set("allocate_on", 1)
    (second,) = gpu.tensors(4, 32)
    pinned = np.zeros((4, 32), np.uint8)
    cases = (
        ([good, host], "some tensors are in host memory"),
        ([good, PointerTensor(host.ctypes.data, (4, 32), "uint8")], "tensor 1, .* not in CUDA's"),
        ([good, PointerTensor(other.address, (5, 32), "uint8")], None),
        ([PointerTensor(good.address, (400, 32), "uint8")], "tensor 0, .* not in CUDA's"),
        ([good, second], "tensor 1, .* not in the memory of GPU 0"),
        ([good, PointerTensor(second.address, (4, 32), "uint8", gpu=1)], "several GPUs: .0, 1."),
        ([PointerTensor(good.address, (4, 32), "uint8", gpu=1)], "not in the memory of GPU 1"),
        ([PointerTensor(good.address, (4, 32), "uint8", gpu=2)], "no GPU 2: the driver lists 2"),
        ([PointerTensor(good.address, (4, 32), "uint8", kind=10)], "nor on an NVIDIA GPU"),
        ([PointerTensor(pinned.ctypes.data, (4, 32), "uint8", kind=2)], "not in CUDA's memory"),
    )
    for tensors, complaint in cases:
        with pytest.raises(DeviceError if complaint else LayoutError, match=complaint):
            CopyWorker(tensors, memory, driver=gpu.driver)
    worker = CopyWorker(
        [PointerTensor(second.address, (4, 32), "uint8", gpu=1)], memory, driver=gpu.driver
    )
    worker.shutdown()


@pytest.mark.parametrize("function", ["cuMemcpyBatchAsync", "cuEventRecord", "cuLaunchKernel"])
def test_a_copy_that_could_not_be_begun_whole_fails_when_nothing_of_it_runs(
    gpu, function, monkeypatch
):
    """The slots may be reused after the result, so it must not come before the last copy."""
    small = function == "cuLaunchKernel"
    monkeypatch.setattr(copies, "BATCH_FROM", 1 << 20 if small else 0)
    memory = SlotMemory(4, 64)
    worker = CopyWorker(gpu.tensors(4, 64), memory, driver=gpu.driver)
    gpu.fake.gate(0)
    gpu.fake.fail(function, OUT_OF_MEMORY, 2 if function == "cuEventRecord" else 1)
    worker.submit_store("bad", [0, 1, 2, 3], [0, 1, 2, 3], stream=gpu.stream)
    running = gpu.fake.live("running")
    if running:
        assert not worker.wait(["bad"], SHORT), "copies of it are still in flight"
    gpu.fake.gate(-1)
    (error,) = ended(worker, "bad").values()
    assert function in error
    assert gpu.fake.live("running") == 0
    with pytest.raises(DeviceError, match=f"no more copies of this GPU's memory: {function}"):
        worker.submit_store("next", [0], [0], stream=gpu.stream)
    assert worker.in_flight == 0
    assert worker.shutdown()


def test_a_bad_stream_or_lack_of_memory_copies_nothing_and_later_copies_work(gpu, monkeypatch):
    monkeypatch.setattr(copies, "BATCH_FROM", 1 << 20)
    memory = SlotMemory(2, 64)
    tensors = gpu.tensors(2048, 64)
    worker = CopyWorker(tensors, memory, driver=gpu.driver)
    with pytest.raises(CudaError, match=f"cuEventRecord.*{INVALID_HANDLE}"):
        worker.submit_store("job", [0], [0], stream=12345)
    with pytest.raises(CudaError, match=f"cuStreamWaitEvent.*{INVALID_HANDLE}"):
        worker.submit_store("job", [0], [0], event=12345)
    gpu.fake.fail("cuMemAlloc", OUT_OF_MEMORY)
    many = list(range(2048))
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        worker.submit_load("job", many, [0] * 2048, stream=gpu.stream)
    assert worker.in_flight == 0
    assert bytes(memory.view(0)) == bytes(64)
    worker.submit_store("job", [1], [0], stream=gpu.stream)
    assert ended(worker, "job") == {"job": ""}
    assert bytes(memory.view(0)) == block(tensors, 1)
    worker.shutdown()


def test_copies_of_a_gpu_that_was_reset_fail_and_nothing_waits_for_it(gpu):
    worker = CopyWorker(gpu.tensors(2, 64), SlotMemory(2, 64), driver=gpu.driver)
    gpu.fake.gate(0)
    worker.submit_store("store", [0], [0], stream=gpu.stream)
    worker.submit_load("load", [1], [1], stream=gpu.stream)
    gpu.fake.sticky(DESTROYED)
    errors = ended(worker, "store", "load")
    assert set(errors) == {"store", "load"}
    assert all(str(DESTROYED) in error for error in errors.values())
    with pytest.raises(DeviceError, match="no more copies"):
        worker.submit_store("next", [0], [0], stream=gpu.stream)
    assert worker.shutdown()
    gpu.fake.reset()
    fresh = CopyWorker(gpu.tensors(2, 64), SlotMemory(2, 64), driver=gpu.driver)
    fresh.submit_store("job", [0], [0], stream=gpu.stream)
    assert ended(fresh, "job") == {"job": ""}
    fresh.shutdown()
    forget_what_a_dead_context_kept(gpu)


def forget_what_a_dead_context_kept(gpu: Gpu) -> None:
    """Resources that a worker gave back while every call failed: a real reset frees them."""
    found = {what: gpu.fake.live(what) for what in EVERYTHING}
    gpu.forget()
    assert found["running"] == 0


def test_a_worker_that_cannot_be_made_leaves_nothing(gpu):
    tensors = gpu.tensors(2, 64)
    for function in (
        "cuDevicePrimaryCtxRetain",
        "cuPointerGetAttribute",
        "cuMemHostRegister",
        "cuMemHostGetDevicePointer",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuStreamCreate",
        "cuEventCreate",
        "cuMemHostAlloc",
        "cuMemAlloc",
    ):
        before = {what: gpu.fake.live(what) for what in EVERYTHING}
        for nth in (1, 2):
            gpu.fake.reset()
            gpu.fake.fail(function, OUT_OF_MEMORY, nth)
            try:
                worker = CopyWorker(tensors, SlotMemory(2, 64), driver=gpu.driver)
            except DeviceError:
                pass
            else:
                assert nth == 2, f"{function} was not called"
                gpu.fake.reset()
                worker.shutdown()
            gpu.fake.reset()
            assert {what: gpu.fake.live(what) for what in EVERYTHING} == before, function


def test_memory_that_its_owner_has_pinned_stays_pinned(gpu):
    memory = SlotMemory(4, 4096)
    tensors = gpu.tensors(2, 64)
    with gpu.driver.current(gpu.context):
        gpu.driver.call("cuMemHostRegister", memory.address, 4 * 4096, 3)
    worker = CopyWorker(tensors, memory, driver=gpu.driver)
    worker.submit_store("job", [1], [3], stream=gpu.stream)
    assert ended(worker, "job") == {"job": ""}
    worker.shutdown()
    with gpu.driver.current(gpu.context):
        gpu.driver.call("cuMemHostUnregister", memory.address)
        gpu.driver.call("cuMemHostRegister", memory.address, 2 * 4096, 3)
    with pytest.raises(DeviceError, match="pinned in part"):
        CopyWorker(tensors, memory, driver=gpu.driver)
    with gpu.driver.current(gpu.context):
        gpu.driver.call("cuMemHostUnregister", memory.address)


def test_copies_that_do_not_end_keep_their_memory(gpu, monkeypatch):
    monkeypatch.setattr(copy_queue, "CLOSE_LIMIT", SHORT)
    memory, tensors = SlotMemory(2, 64), gpu.tensors(2, 64)
    worker = CopyWorker(tensors, memory, driver=gpu.driver)
    gpu.fake.gate(0)
    worker.submit_store("job", [0], [0], stream=gpu.stream)
    assert not worker.shutdown()
    assert gpu.fake.live("pinned") > 0, "the GPU may still write to it"
    gpu.fake.gate(-1)
    (undo, *_) = ABANDONED.pop()
    with gpu.driver.current(gpu.context):
        gpu.driver.call("cuStreamSynchronize", 0)
        undo.close()
    forget_what_a_dead_context_kept(gpu)


def test_a_child_of_a_process_with_a_worker_gets_an_error_and_leaves_the_gpu_alone(gpu):
    worker = CopyWorker(gpu.tensors(4, 64), SlotMemory(2, 64), driver=gpu.driver)

    def use() -> None:
        with pytest.raises(CacheClosed):
            worker.submit_store("other", [0], [0], stream=0)
        worker.shutdown()

    assert in_child(use)
    worker.submit_store("job", [0], [0], stream=0)
    assert ended(worker, "job") == {"job": ""}
    worker.shutdown()


def test_pieces_of_different_allocations_are_not_joined(gpu, monkeypatch):
    """A copy from one allocation into another one fails, even if their addresses follow one
    another."""
    (packed,) = gpu.tensors(16, 512)
    halves = [
        GpuTensor(packed.address + 256 * i, (16, 256), "uint8", strides=(512, 1)) for i in range(2)
    ]
    memory = SlotMemory(16, 512)
    bases = {packed.address: 1 << 40, packed.address + 256: 2 << 40}
    monkeypatch.setattr(type(gpu.driver), "allocation", lambda _, address: bases[address])
    monkeypatch.setattr(copies, "BATCH_FROM", 0)
    worker = CopyWorker(halves, memory, driver=gpu.driver)
    before = gpu.fake.calls("pieces")
    worker.submit_store("store", [3, 4], [1, 2], stream=gpu.stream)
    assert worker.wait(["store"], 60.0)
    assert gpu.fake.calls("pieces") - before == 4
    assert bytes(memory.view(2)) == block([packed], 4)
    worker.shutdown()


@pytest.mark.parametrize("way", ["store", "load"])
def test_kernels_of_a_copy_begin_after_the_engines_work(gpu, monkeypatch, way):
    """The stand-in compares the kernel's memory with that of the engine's copy."""
    tensors = gpu.tensors(4, 64, 32)
    memory = SlotMemory(4, 96)
    monkeypatch.setattr(copies, "BATCH_FROM", 1 << 20)
    worker = CopyWorker(tensors, memory, driver=gpu.driver)
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
