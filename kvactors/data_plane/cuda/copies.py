"""Copies between a GPU and pinned host memory: large pieces by the copy engines, many in one call,
and small ones by a kernel.

A copy engine takes a few microseconds a copy at any size and leaves the multiprocessors to the
model. The kernel is fast at any size, but occupies a few multiprocessors for as long as the copy
takes. The thread that submits copies puts them on the stream of their direction. Any thread asks
the driver's events how far they are. No thread waits for the GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.device import CudaTensors
from kvactors.data_plane.cuda.driver import (
    DEVICE_MAP,
    FATAL,
    NO_KERNEL,
    NON_BLOCKING,
    NOT_READY,
    NOT_SUPPORTED,
    PORTABLE,
    UNTIMED,
    CudaContext,
    CudaDriver,
    CudaError,
    quietly,
)
from kvactors.errors import DeviceError

Numbers = NDArray[np.int64]

log = get_logger()

# -- Pins of host memory that several users in a process share.


ALREADY_REGISTERED = 712

PINS: dict[int, list[int]] = {}
"""Bytes and users of the memory that this process has pinned, by address."""


class HostPin:
    """Host memory that the GPU may address (at `on_device`) until `release`. Memory that its owner
    has pinned stays the owner's, who keeps it pinned as long as copies of it are made. Pins of the
    same memory are made by one thread at a time. DeviceError if the memory is pinned in part."""

    def __init__(self, context: CudaContext, address: int, nbytes: int) -> None:
        self._driver = driver = context.driver
        self._address = address
        pinned = PINS.get(address)
        if pinned is None:
            code = driver.status("cuMemHostRegister", address, nbytes, PORTABLE | DEVICE_MAP)
            if code == 0:
                pinned = PINS[address] = [nbytes, 0]
            elif code != ALREADY_REGISTERED:
                raise driver.error("cuMemHostRegister", code)
        self._pinned = pinned
        if pinned is not None:
            pinned[1] += 1
        try:
            if not self._reaches(nbytes):
                raise DeviceError(
                    f"{nbytes} bytes of host memory are pinned in part: pin all of it or none"
                )
            self.on_device = driver.read("cuMemHostGetDevicePointer", address, 0)
        except BaseException:
            self.release()
            raise

    def _reaches(self, nbytes: int) -> bool:
        """Whether the memory is pinned up to its last byte."""
        if self._pinned is not None:
            return self._pinned[0] >= nbytes
        last = ctypes.byref(ctypes.c_uint64())
        return not self._driver.status(
            "cuMemHostGetDevicePointer", last, self._address + nbytes - 1, 0
        )

    def release(self) -> None:
        """Unpin the memory if nothing else uses it. The context must be current."""
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return
        pinned[1] -= 1
        if not pinned[1]:
            del PINS[self._address]
            quietly(self._driver, "cuMemHostUnregister", self._address)


# -- A direction's stream on a GPU, with the events and the memory of its copies.


FIRST_PAIRS = 1024
"""Pairs for which scratch memory is allocated at start. A larger transfer replaces it with a
larger one."""


class Scratch:
    """Pinned host memory for `count` int64, and as much on the device. `host`: the host memory as
    an array. `device`: the address on the device."""

    def __init__(self, driver: CudaDriver, count: int) -> None:
        self.count = count
        self._driver = driver
        self._undo = ExitStack()
        try:
            flags = PORTABLE | DEVICE_MAP
            self._pinned = driver.make(self._undo, "cuMemHostAlloc", 8 * count, flags)
            self.device = driver.make(self._undo, "cuMemAlloc", 8 * count)
        except BaseException:
            self._undo.close()
            raise
        self.host: Numbers = np.frombuffer(
            memoryview((ctypes.c_int64 * count).from_address(self._pinned)), np.int64
        )

    def push(self, numbers: Numbers, stream: int) -> None:
        """Bring numbers to the device, in the stream's order. CudaError."""
        self.host[: len(numbers)] = numbers
        self._driver.call("cuMemcpyHtoDAsync", self.device, self._pinned, numbers.nbytes, stream)

    def close(self) -> None:
        self._undo.close()


@dataclass(eq=False)
class Transfer:
    """Copies of some pairs in one direction, and what they use on the GPU.

    Attributes:
        events: one for each group of pieces, reached when the group has been copied.
        reached: how many of the events have been.
        recorded: whether all events are on the stream.
        error: why bytes did not arrive, empty if they did.
        ended: whether no part of the transfer runs any more.
        seconds: from the submission to the call that found the end.
        code: the driver's last answer.
    """

    to_device: bool
    events: list[int] = field(default_factory=list)
    scratch: Scratch | None = None
    began: float = field(default_factory=time.monotonic)
    reached: int = 0
    recorded: bool = False
    error: str = ""
    ended: bool = False
    seconds: float = 0.0
    code: int = 0


class Lane:
    """One direction: its stream, unused events and scratch memory, and totals: calls for many
    copies, launches of the kernel, calls for one copy, bytes, and transfers that failed. Made, and
    closed by `undo`, with the GPU's context current."""

    def __init__(self, driver: CudaDriver, undo: ExitStack) -> None:
        self.batches = self.launches = self.singles = self.bytes = self.errors = 0
        self.stream = driver.make(undo, "cuStreamCreate", NON_BLOCKING)
        self._driver = driver
        self._undo = undo
        self._events: list[int] = []
        self._scratches: list[Scratch] = []
        undo.callback(self._close)
        self._scratches.append(Scratch(driver, 2 * FIRST_PAIRS))

    def _close(self) -> None:
        while self._scratches:
            self._scratches.pop().close()

    def take_event(self) -> int:
        if self._events:
            return self._events.pop()
        return self._driver.make(self._undo, "cuEventCreate", UNTIMED)

    def take_scratch(self, count: int) -> Scratch:
        found = self._scratches.pop() if self._scratches else None
        if found is not None:
            if found.count >= count:
                return found
            found.close()
        return Scratch(self._driver, max(2 * FIRST_PAIRS, 1 << (count - 1).bit_length()))

    def give_back(self, transfer: Transfer) -> None:
        """No part of a transfer runs any more: take its resources back."""
        self._events += transfer.events
        if transfer.scratch is not None:
            self._scratches.append(transfer.scratch)


# -- Fewer copies for the same bytes: pieces that follow one another on the device and in the slot
# are one column, and rows of a column that follow one another on both sides are one copy.


class Columns(NamedTuple):
    """Bytes of a block that are contiguous on the device and in a slot: address of the first row,
    bytes from a row to the next one, bytes of a row, bytes from the start of a slot. Arrays of the
    same length."""

    regions: Numbers
    strides: Numbers
    sizes: Numbers
    offsets: Numbers


def join_columns(columns: Columns, allocations: Numbers) -> Columns:
    """Columns in which neighbours are joined. A copy must not reach from one allocation into
    another one, even if their addresses follow one another."""
    if len(columns.sizes) < 2:
        return columns
    regions, strides, sizes, offsets = columns
    joined = (
        (regions[:-1] + sizes[:-1] == regions[1:])
        & (strides[:-1] == strides[1:])
        & (offsets[:-1] + sizes[:-1] == offsets[1:])
        & (allocations[:-1] == allocations[1:])
    )
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return Columns(regions[first], strides[first], np.add.reduceat(sizes, first), offsets[first])


def plan_copies(
    columns: Columns, rows: Numbers, places: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """The copies of n pairs: address on the device, address on the host, bytes."""
    regions, strides, sizes, offsets = columns
    if len(sizes) == 1 and strides[0] == sizes[0]:
        broken = (np.diff(rows) != 1) | (np.diff(places) != sizes[0])
        first = np.flatnonzero(np.concatenate(([True], broken)))
        lengths = np.diff(np.append(first, len(rows)))
        rows, places = rows[first], places[first]
    else:
        lengths = np.ones(len(rows), np.int64)
    on_device = regions + rows[:, None] * strides
    on_host = places[:, None] + offsets
    return on_device.ravel(), on_host.ravel(), (sizes * lengths[:, None]).ravel()


# -- Copies of one GPU's blocks.


BATCH_FROM = 32 << 10
"""Bytes of a piece from which on it goes by the copy engines, unless set otherwise."""

BATCH = 4096
"""Copies in one call. The driver holds its locks during the call, and queries of events wait for
them."""

BLOCKS_OF_THREADS, THREADS = 8, 256
"""Size of the kernel's grid: 8 of an H100's 132 multiprocessors saturate its PCIe link."""

KERNELS = Path(__file__).with_name("kernels.ptx")
NAMES = {False: "kvactors_gather", True: "kvactors_scatter"}
"""By whether they copy to the device."""


class HostSlotPlan(NamedTuple):
    """Where blocks are in host memory: rows of `slots_per_row` blocks, `row_stride` bytes apart, in
    each of which the share of this GPU begins at byte `offset`."""

    address: int
    nbytes: int
    offset: int
    row_stride: int
    slots_per_row: int
    num_slots: int

    def places(self, slots: Numbers, block_bytes: int) -> Numbers:
        """Bytes from the start of the share to each slot."""
        rows, inside = slots // self.slots_per_row, slots % self.slots_per_row
        return rows * self.row_stride + inside * block_bytes


class Copies:
    """Puts copies on the streams of a GPU, and asks how far they are. Made with the GPU's context
    current. batch_from: bytes of a piece from which on it goes by the copy engines. undo: receives
    the clean-up of each resource, to be run when every transfer has ended.

    Attributes:
        lanes: by whether they copy to the device.
        broken: why no more copies are made, empty while they are possible.
        lost: whether the GPU's memory may have been lost.
    """

    def __init__(
        self,
        device: CudaTensors,
        plan: HostSlotPlan,
        undo: ExitStack,
        *,
        batch_from: int | None = None,
    ) -> None:
        self.device = device
        self.driver = driver = device.driver
        self.broken = ""
        self.lost = False
        self.has_batch = driver.has_batch
        self.block_bytes = int(device.piece_bytes.sum())
        self._plan = plan
        pin = HostPin(device, plan.address, plan.nbytes)
        undo.callback(pin.release)
        self._address, self._mapped = plan.address + plan.offset, pin.on_device + plan.offset
        self.kernels = self._load_kernels(undo)
        # a separate number for each region whose allocation the driver does not tell
        bases = [driver.allocation(address) for address in device.regions.tolist()]
        self._allocations = np.array([base or -1 - i for i, base in enumerate(bases)], np.int64)
        self.batch_from = BATCH_FROM if batch_from is None else batch_from
        rows = self._split()
        table = Scratch(driver, max(1, len(rows)))
        undo.callback(table.close)
        self._table = table.device
        self.lanes = {way: Lane(driver, undo) for way in (False, True)}
        table.push(rows, self.lanes[True].stream)
        driver.call("cuStreamSynchronize", self.lanes[True].stream)

    def _load_kernels(self, undo: ExitStack) -> dict[bool, int] | None:
        """The kernels, or None if this driver cannot make them out of their text."""
        try:
            module = self.driver.make(undo, "cuModuleLoadData", KERNELS.read_bytes())
        except CudaError as error:
            if error.code not in NO_KERNEL:
                raise
            log.warning("no kernels for this GPU: copies go piece by piece", error=str(error))
            return None
        return {
            way: self.driver.read("cuModuleGetFunction", module, name.encode())
            for way, name in NAMES.items()
        }

    def _split(self) -> Numbers:
        """Decide how each piece goes. Returns the kernel's table. Pieces with gaps from one block
        to the next go by the copy engines, because the kernel has no number for the gap."""
        device = self.device
        if self.kernels is None:
            self.batch_from = 0
        by_kernel = (device.piece_bytes < self.batch_from) & (device.strides == device.piece_bytes)
        self._small, self._large = np.flatnonzero(by_kernel), np.flatnonzero(~by_kernel)
        columns = device.regions, device.piece_bytes, device.offsets
        return np.stack([one[self._small] for one in columns], axis=1).ravel()

    # -- submission

    def submit(
        self,
        transfer: Transfer,
        blocks: Numbers,
        slots: Numbers,
        groups: Sequence[range],
        after: Sequence[int] = (),
    ) -> None:
        """Put the copies of n pairs on the stream of their direction, behind the events `after`,
        and an event after each group of pieces (in contract order). CudaError: nothing was begun.
        An error after the first copy was begun is the transfer's, since bytes may be on their way.
        The context must be current. Calls of one direction come one at a time."""
        lane = self.lanes[transfer.to_device]
        try:
            for _ in groups:
                transfer.events.append(lane.take_event())
            if self._small.size:
                transfer.scratch = lane.take_scratch(2 * len(blocks))
            for event in after:
                self.driver.call("cuStreamWaitEvent", lane.stream, event, 0)
        except BaseException:
            lane.give_back(transfer)
            raise
        try:
            self._put(transfer, lane, blocks, slots, groups)
            transfer.recorded = True
        except Exception as error:
            self._fail(transfer, error)

    def _put(
        self,
        transfer: Transfer,
        lane: Lane,
        blocks: Numbers,
        slots: Numbers,
        groups: Sequence[range],
    ) -> None:
        order = np.argsort(slots, kind="stable")  # neighbours are copied together
        blocks = blocks[order]
        places = self._plan.places(slots[order], self.block_bytes)
        if transfer.scratch is not None and len(blocks):
            transfer.scratch.push(np.concatenate((blocks, places)), lane.stream)
        for pieces, event in zip(groups, transfer.events, strict=True):
            if len(blocks):
                self._enqueue(transfer, lane, blocks, places, pieces)
            self.driver.call("cuEventRecord", event, lane.stream)

    def _enqueue(
        self, transfer: Transfer, lane: Lane, blocks: Numbers, places: Numbers, pieces: range
    ) -> None:
        device, n = self.device, len(blocks)
        first, last = np.searchsorted(self._small, (pieces.start, pieces.stop)).tolist()
        if last > first:
            assert transfer.scratch is not None
            ids, row = transfer.scratch.device, self._table + 24 * first
            # host memory is counted in bytes, so the stride of the kernel's slots is 1
            arguments = (row, last - first, ids, ids + 8 * n, n, self._mapped, 1)
            self._launch(transfer.to_device, arguments, lane.stream)
            lane.launches += 1
        first, last = np.searchsorted(self._large, (pieces.start, pieces.stop)).tolist()
        if last > first:
            large = self._large[first:last]
            tables = device.regions, device.strides, device.piece_bytes, device.offsets
            columns = Columns(*(table[large] for table in tables))
            joined = join_columns(columns, self._allocations[large])
            copies = plan_copies(joined, blocks, self._address + places)
            for at in range(0, len(copies[0]), BATCH):
                self._by_engine(transfer.to_device, lane, *(one[at : at + BATCH] for one in copies))
        lane.bytes += n * int(device.piece_bytes[pieces.start : pieces.stop].sum())

    def _by_engine(
        self, to_device: bool, lane: Lane, on_device: Numbers, on_host: Numbers, sizes: Numbers
    ) -> None:
        """Put copies on a stream, in any order: by one call, or by one for each copy, which is all
        that drivers before 12.8 have."""
        targets, sources = (on_device, on_host) if to_device else (on_host, on_device)
        if self.has_batch:
            targets, sources, sizes = map(np.ascontiguousarray, (targets, sources, sizes))
            addresses = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
            try:
                self.driver.copy_batch(*addresses, len(sizes), lane.stream)
                lane.batches += 1
                return
            except CudaError as error:
                if error.code != NOT_SUPPORTED:
                    raise
                self.has_batch = False
        self.driver.copy_singly(to_device, targets, sources, sizes, lane.stream)
        lane.singles += len(sizes)

    def _launch(self, to_device: bool, arguments: tuple[int, ...], stream: int) -> None:
        """Launch a kernel with the arguments of block_copy.cu. Raises CudaError."""
        assert self.kernels is not None
        values = (ctypes.c_int64 * len(arguments))(*arguments)
        base = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(
            *(base + 8 * i for i in range(len(arguments)))
        )
        tiles = arguments[1] * arguments[4]
        grid = max(1, min(BLOCKS_OF_THREADS, -(-tiles // (THREADS // 32))))
        shape = (grid, 1, 1, THREADS, 1, 1, 0)
        kernel = self.kernels[to_device]
        self.driver.call("cuLaunchKernel", kernel, *shape, stream, pointers, None)

    # -- progress

    def ask(self, transfer: Transfer) -> bool:
        """Ask the driver how far a transfer is. Returns whether no part of it runs any more. An
        event that was reached stays reached: errors come later."""
        if transfer.ended:
            return True
        try:
            with self.device.current():
                function, code = self._query(transfer)
        except CudaError as error:
            function, code = error.function, error.code
        if code not in (0, NOT_READY):
            self._fail(transfer, self.driver.error(function, code))
        # a code that persists is that of a context which runs nothing any more
        if code == 0 or (code in FATAL and code == transfer.code):
            transfer.seconds = time.monotonic() - transfer.began
            transfer.ended = True
        transfer.code = code
        return transfer.ended

    def _query(self, transfer: Transfer) -> tuple[str, int]:
        driver, events = self.driver, transfer.events
        if not transfer.recorded:  # copies that were begun before an error end before this event
            stream = self.lanes[transfer.to_device].stream
            if code := driver.status("cuEventRecord", events[-1], stream):
                return "cuEventRecord", code
            transfer.recorded = True
        if transfer.error:
            return "cuEventQuery", driver.status("cuEventQuery", events[-1])
        while transfer.reached < len(events):
            if code := driver.status("cuEventQuery", events[transfer.reached]):
                return "cuEventQuery", code
            transfer.reached += 1
        return "", 0

    def _fail(self, transfer: Transfer, error: BaseException) -> None:
        transfer.error = transfer.error or str(error)
        self.break_off(error)

    def break_off(self, error: BaseException) -> None:
        """Copy nothing more: the state of the GPU's work is unknown. Transfers in flight end."""
        lost = isinstance(error, CudaError) and error.code in FATAL
        if not self.broken or (lost and not self.lost):
            self.broken = str(error)
            self.lost |= lost
            log.error(
                "no more copies of this GPU's memory",
                gpu=self.device.name,
                error=str(error),
                memory_lost=lost,
            )
