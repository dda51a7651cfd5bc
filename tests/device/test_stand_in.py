"""The stand-in driver refuses what a driver refuses, and finds uses of memory that nothing
orders."""

from __future__ import annotations

import ctypes
import threading

import pytest

from kvactors.data_plane.cuda.copies import KERNELS
from tests.support.cuda import opened_gpu

INVALID, CONTEXT, HANDLE, MISALIGNED = 1, 201, 400, 716
NBYTES = 4096


@pytest.fixture
def gpu():
    with opened_gpu() as found:
        yield found
        found.fake.forgive()


class Streams:
    """Two streams, device memory, pinned memory and an event."""

    def __init__(self, gpu) -> None:
        self.driver = gpu.driver
        self.first, self.second = (self.driver.read("cuStreamCreate", 1) for _ in range(2))
        self.event = self.driver.read("cuEventCreate", 2)
        self.pinned = self.driver.read("cuMemHostAlloc", NBYTES, 3)
        self.device = gpu.allocate(NBYTES)

    def write(self, stream: int, first: int = 0, size: int = 64) -> None:
        address = self.device + first
        self.driver.call("cuMemcpyHtoDAsync", address, self.pinned + first, size, stream)

    def read(self, stream: int, first: int = 0, to: int = 2048) -> None:
        host, address = self.pinned + to, self.device + first
        self.driver.call("cuMemcpyDtoHAsync", host, address, 64, stream)

    def close(self) -> None:
        for stream in (self.first, self.second):
            self.driver.call("cuStreamSynchronize", stream)
            self.driver.call("cuStreamDestroy", stream)
        self.driver.call("cuEventDestroy", self.event)
        self.driver.call("cuMemFreeHost", self.pinned)


@pytest.fixture
def streams(gpu):
    with gpu.driver.current(gpu.context):
        found = Streams(gpu)
        yield found
        gpu.fake.gate(-1)
        found.close()


@pytest.mark.parametrize("held", [False, True], ids=["at once", "held up"])
def test_uses_of_the_same_memory_without_an_order_are_races(gpu, streams, held):
    """Also if the first one has ended by chance before the second one begins."""
    gpu.fake.gate(0 if held else -1)
    streams.write(streams.first)
    streams.read(streams.second)
    gpu.fake.gate(-1)
    streams.driver.call("cuStreamSynchronize", streams.first)
    streams.driver.call("cuStreamSynchronize", streams.second)
    assert gpu.fake.live("races") == 1


@pytest.mark.parametrize("order", ["event", "stream", "waited", "queried", "read", "elsewhere"])
def test_uses_that_are_ordered_or_do_not_meet_are_none(gpu, streams, order):
    driver, first, second = streams.driver, streams.first, streams.second
    if order == "read":
        streams.read(first, to=1024)
    else:
        streams.write(first)
    driver.call("cuEventRecord", streams.event, first)
    if order == "event":
        driver.call("cuStreamWaitEvent", second, streams.event, 0)
    elif order == "stream":
        second = first
    elif order == "waited":
        driver.call("cuEventSynchronize", streams.event)
    elif order == "queried":
        while driver.status("cuEventQuery", streams.event):
            pass
    streams.read(second, 64 if order == "elsewhere" else 0)
    driver.call("cuStreamSynchronize", streams.first)
    driver.call("cuStreamSynchronize", streams.second)
    assert gpu.fake.live("races") == 0


def test_an_event_orders_only_what_was_before_it(gpu, streams):
    driver = streams.driver
    driver.call("cuEventRecord", streams.event, streams.first)
    streams.write(streams.first)
    driver.call("cuStreamWaitEvent", streams.second, streams.event, 0)
    streams.read(streams.second)
    driver.call("cuStreamSynchronize", streams.first)
    driver.call("cuStreamSynchronize", streams.second)
    assert gpu.fake.live("races") == 1


def test_targets_of_a_batch_must_not_overlap(gpu, streams):
    numbers = (ctypes.c_uint64 * 6)(
        streams.device, streams.device + 32, streams.pinned, streams.pinned + 64, 64, 64
    )
    at = ctypes.addressof(numbers)
    streams.driver.copy_batch(at, at + 16, at + 32, 2, streams.first)
    assert gpu.fake.live("races") == 1


def test_a_copy_stays_within_one_allocation(gpu, streams):
    other = gpu.allocate(NBYTES)
    reach = max(other, streams.device) - min(other, streams.device) + 64
    start = min(other, streams.device)
    code = gpu.driver.status("cuMemcpyHtoDAsync", start, streams.pinned, reach, streams.first)
    assert code == INVALID


def test_a_thread_needs_the_right_context(gpu, streams):
    codes = []

    def call() -> None:
        codes.append(gpu.driver.status("cuStreamSynchronize", streams.first))
        gpu.driver.call("cuCtxPushCurrent", 12345)
        codes.append(gpu.driver.status("cuStreamSynchronize", streams.first))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert codes == [CONTEXT, CONTEXT]


def test_unknown_handles_and_misaligned_arguments_are_refused(gpu, streams):
    driver = gpu.driver
    for call in (
        ("cuStreamWaitEvent", streams.first, 5, 0),
        ("cuStreamWaitEvent", 5, streams.event, 0),
        ("cuEventRecord", 5, streams.first),
        ("cuEventQuery", 5),
    ):
        assert driver.status(*call) == HANDLE
    module = driver.read("cuModuleLoadData", KERNELS.read_bytes())
    kernel = driver.read("cuModuleGetFunction", module, b"kvactors_gather")
    table = streams.device
    ctypes.memmove(table, (ctypes.c_int64 * 3)(streams.device + 1024, 16, 0), 24)
    for wrong in range(4):
        numbers = [table, 1, streams.device + 512, streams.device + 520, 1, streams.pinned, 64]
        if wrong < 3:
            numbers[wrong if wrong == 0 else wrong + 1] += 4
        values = (ctypes.c_int64 * 7)(*numbers)
        at = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * 7)(*(at + 8 * i for i in range(7)))
        driver.call("cuLaunchKernel", kernel, 1, 1, 1, 256, 1, 1, 0, streams.first, pointers, None)
        code = driver.status("cuStreamSynchronize", streams.first)
        assert code == (MISALIGNED if wrong < 3 else 0), wrong
        gpu.fake.sticky(0)
    driver.call("cuModuleUnload", module)
