"""Devices whose regions are memory of an NVIDIA GPU: an engine's tensors, taken by address, or
memory that the device allocates.

No framework takes part in copies, and none is needed: tensors come by DLPack or by the CUDA array
interface. The device keeps a reference to them, and checks before every batch of copies that their
addresses have not changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.cuda.driver import (
    CudaContext,
    CudaDriver,
    CudaError,
    load_driver,
    verify_memory,
)
from kvactors.device.arena import Arena
from kvactors.device.base import Device, checked_numbers
from kvactors.device.host import HostDevice
from kvactors.device.tensors import (
    TYPESTRS,
    Region,
    Rows,
    TensorDevice,
    ensure_in_place,
    region_of,
    rows_of,
)
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout.base import ITEM_BYTES, Layout


def cuda_region_of(tensor: Any) -> Region:
    """A GPU tensor's region, by DLPack, the CUDA array interface (version 2 or 3) or `data_ptr()`.
    Raises DeviceError for a tensor that is on the host, read-only, not contiguous, or of a dtype
    that cannot hold blocks."""
    region = region_of(tensor)
    if region.host:
        raise DeviceError(
            f"a tensor of shape {list(region.shape)} is in host memory: use a TensorDevice"
        )
    return region


class DeviceMemory(NamedTuple):
    """Memory that the device has allocated, as a tensor that every framework with the CUDA array
    interface accepts.
    """

    address: int
    shape: tuple[int, ...]
    typestr: str

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.typestr,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
        }


def checked_ids(
    device: Device, arena: Arena, blocks: Sequence[int], slots: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids as int64 arrays. ValueError for ids out of range, unequal lengths, or an arena whose
    slots are too small."""
    ids, places = checked_numbers(block=(blocks, device.num_blocks), slot=(slots, arena.num_slots))
    if arena.stride < device.piece_bytes.sum():
        raise ValueError(
            f"slots of {arena.stride} bytes are too small for blocks of {device.piece_bytes.sum()}"
        )
    return ids, places


class CudaTensors(CudaContext):
    """Tensors of one GPU, whose rows are the pieces of its blocks. DeviceError for tensors of
    several GPUs, and for one that is not memory of the GPU that it names."""

    def __init__(self, rows: Sequence[Rows], driver: CudaDriver) -> None:
        ordinals = sorted({one.ordinal or 0 for one in rows})
        if len(ordinals) > 1:
            raise DeviceError(f"tensors of several GPUs: {ordinals}. A worker copies those of one")
        super().__init__(ordinals[0], driver)
        try:
            self._take_rows(rows)
        except BaseException:
            self.close()
            raise

    def _take_rows(self, rows: Sequence[Rows]) -> None:
        with self.current():
            for i, one in enumerate(rows):
                what = f"tensor {i}, of {one.rows} rows of {one.nbytes} bytes,"
                size = (one.rows - 1) * one.stride + one.nbytes
                verify_memory(self.driver, one.address, size, self.ordinal, what)
        self.num_blocks = rows[0].rows
        self.regions = np.array([one.address for one in rows], np.int64)
        self.piece_bytes = np.array([one.nbytes for one in rows], np.int64)
        self.strides = np.array([one.stride for one in rows], np.int64)
        self.offsets = np.cumsum(self.piece_bytes) - self.piece_bytes


class CudaDevice(CudaTensors, Device):
    """tensors: in the layout's contract order, or by (layer, role). Each has shape [blocks, *the
    role's shape] and is on the GPU `ordinal`.

    driver: the system's by default. offsets: of the pieces within a slot, int64, in bytes. `close`
    releases every resource. Raises LayoutError for the first tensor that has another shape or
    dtype, DeviceError for one that cannot be used, and CudaError if a call of the driver fails.
    """

    kind = "cuda"

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Any] | Mapping[tuple[int, str], Any],
        *,
        ordinal: int = 0,
        driver: CudaDriver | None = None,
    ) -> None:
        self._open(layout, ordinal, driver or load_driver())
        try:
            self._take(TensorDevice._ordered(layout, tensors))
        except BaseException:
            self.close()
            raise

    @classmethod
    def allocate(
        cls, layout: Layout, num_blocks: int, *, ordinal: int = 0, driver: CudaDriver | None = None
    ) -> CudaDevice:
        """A device of new memory (not zeroed), freed by `close`. LayoutError, DeviceError,
        CudaError."""
        device = cls.__new__(cls)
        device._open(layout, ordinal, driver or load_driver())
        try:
            with device.current():
                device._take(layout.allocate(device._make, num_blocks))
        except BaseException:
            device.close()
            raise
        return device

    def _open(self, layout: Layout, ordinal: int, driver: CudaDriver) -> None:
        self.layout = layout
        CudaContext.__init__(self, ordinal, driver)

    def _make(self, shape: tuple[int, ...], dtype: str) -> DeviceMemory:
        size = int(np.prod(shape)) * ITEM_BYTES[dtype]
        address = self.driver.make(self._undo, "cuMemAlloc", size)
        typestr = next(typestr for typestr, name in TYPESTRS.items() if name == dtype)
        return DeviceMemory(address, shape, typestr)

    def _take(self, tensors: list[Any]) -> None:
        self.tensors = tensors
        regions = [cuda_region_of(tensor) for tensor in tensors]
        blocks = regions[0].shape[0] if regions and regions[0].shape else 0
        if blocks < 1:
            raise LayoutError("a device needs at least 1 block")
        self.layout.verify([(region.shape, region.dtype) for region in regions], blocks)
        self._take_rows([rows_of(tensor) for tensor in tensors])

    # -- copies

    def ensure_in_place(self) -> None:
        """DeviceError if a tensor has moved since it was registered: its framework has given the
        memory away."""
        ensure_in_place(self.layout, self.tensors, self.regions)

    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """See `Device`; DeviceError and CudaError besides. One driver call per piece:
        `CudaCopyEngine` is faster."""
        self._copy(False, blocks, arena, slots, None)

    def copy_to_device(
        self, blocks: Sequence[int], arena: Arena, slots: Sequence[int], layers: range | None = None
    ) -> None:
        self._copy(True, blocks, arena, slots, layers)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Device`; one driver call per piece. CudaError."""
        self.ensure_in_place()
        checked_numbers(source=(sources, self.num_blocks), target=(targets, self.num_blocks))
        pieces = list(zip(self.regions.tolist(), self.piece_bytes.tolist(), strict=True))
        with self._settled():
            for source, target in zip(sources, targets, strict=True):
                for region, size in pieces:
                    to, of = region + target * size, region + source * size
                    self.driver.call("cuMemcpyDtoDAsync", to, of, size, self._stream)

    def _copy(
        self,
        to_device: bool,
        blocks: Sequence[int],
        arena: Arena,
        slots: Sequence[int],
        layers: range | None,
    ) -> None:
        self.ensure_in_place()
        ids, places = checked_ids(self, arena, blocks, slots)
        pieces, _ = self.share(layers)
        sizes = self.piece_bytes[pieces]
        on_device = self.regions[pieces] + ids[:, None] * sizes
        on_host = arena.address + places[:, None] * arena.stride + self.offsets[pieces]
        nbytes = np.broadcast_to(sizes, on_device.shape).ravel()
        targets, sources = (on_device, on_host) if to_device else (on_host, on_device)
        with self._settled():
            self.driver.copy_singly(
                to_device, targets.ravel(), sources.ravel(), nbytes, self._stream
            )

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Copies that have ended afterwards, also after a CudaError: the caller has its memory
        back."""
        with self.current():
            try:
                yield
                self.driver.call("cuStreamSynchronize", self._stream)
            except CudaError:
                self.driver.settle(self.context, self._stream)
                raise

    def fill(self, blocks: Sequence[int], keys: bytes) -> None:
        """See `HostDevice.fill`. For tests and benchmarks, by way of the host."""
        with self._staged(blocks) as (host, arena, ids):
            host.fill(ids, keys)
            host.copy_to_host(ids, arena, ids)
            self.copy_to_device(blocks, arena, ids)

    def check(self, blocks: Sequence[int], keys: bytes) -> list[int]:
        """See `HostDevice.check`. For tests and benchmarks, by way of the host."""
        with self._staged(blocks) as (host, arena, ids):
            self.copy_to_host(blocks, arena, ids)
            host.copy_to_device(ids, arena, ids)
            return host.check(ids, keys)

    @contextmanager
    def _staged(self, blocks: Sequence[int]) -> Iterator[tuple[HostDevice, Arena, range]]:
        """Host memory for some blocks, as blocks of a device and as slots, and their numbers."""
        host = HostDevice(self.layout, max(1, len(blocks)))
        arena = Arena(len(blocks), self.layout.block_bytes)
        try:
            yield host, arena, range(len(blocks))
        finally:
            arena.close()
