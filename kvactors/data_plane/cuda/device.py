"""Devices whose regions are memory of an NVIDIA GPU: an engine's tensors, taken by address, or
memory that the device allocates.

No framework takes part in copies, and none is needed: tensors come by DLPack or by the CUDA array
interface. The device keeps a reference to them, and checks before every batch of copies that their
addresses have not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.driver import (
    DEVICE_MAP,
    NON_BLOCKING,
    PORTABLE,
    CudaDriver,
    CudaError,
    load_driver,
)
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.device.tensors import Region, TensorDevice, region_of
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout.base import ITEM_BYTES, Layout
from kvactors.native import check_blocks, fill_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

TYPESTRS = {
    "<f4": "float32",
    "<f2": "float16",
    "<V2": "bfloat16",
    "|u1": "uint8",
    "|i1": "int8",
    "<u1": "uint8",
    "<i1": "int8",
    "|V1": "uint8",
}
"""The CUDA array interface's types. It has none for bfloat16, nor for eight-bit floats: they come
as opaque bytes."""

MEMORY_TYPE, DEVICE_ORDINAL = 2, 9
"""Attributes of a pointer, by the driver's numbers."""
ON_DEVICE = 2
"""The memory type of cuMemAlloc's allocations."""

log = get_logger()


def cuda_region_of(tensor: Any) -> Region:
    """A GPU tensor's region, by DLPack or, for a tensor without it, the CUDA array interface
    (version 2 or 3). Raises DeviceError for a tensor that is on the host, read-only, not
    contiguous, or of a dtype that cannot hold blocks."""
    if hasattr(tensor, "__dlpack__"):
        region = region_of(tensor)
        if region.host:
            raise DeviceError(
                f"a tensor of shape {list(region.shape)} is in host memory: use a TensorDevice"
            )
        return region
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if interface is None:
        raise DeviceError(
            f"{type(tensor).__name__} is no GPU tensor: it has neither DLPack nor the CUDA array "
            "interface"
        )
    return _region_by_interface(interface)


def _region_by_interface(interface: Mapping[str, Any]) -> Region:
    shape, typestr = tuple(interface["shape"]), interface["typestr"]
    address, read_only = interface["data"]
    if interface.get("version", 0) < 2:
        raise DeviceError(
            f"version {interface.get('version')} of the CUDA array interface is too old"
        )
    if read_only:
        raise DeviceError(f"a tensor of shape {list(shape)} is read-only")
    if interface.get("mask") is not None:
        raise DeviceError(f"a tensor of shape {list(shape)} is masked")
    dtype = TYPESTRS.get(typestr)
    if dtype is None:
        raise DeviceError(f"tensors of type {typestr!r} cannot hold blocks")
    expected = ITEM_BYTES[dtype]
    for size, stride in zip(
        reversed(shape), reversed(interface.get("strides") or ()), strict=False
    ):
        if size != 1 and stride != expected:
            raise DeviceError(f"a tensor of shape {list(shape)} is not contiguous")
        expected *= size
    return Region(int(address or 0), shape, dtype, host=False)


def cuda_address_of(tensor: Any) -> int:
    """The present address of a GPU tensor, as its framework reports it. Fast enough to check before
    every batch. Raises DeviceError."""
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    interface = getattr(tensor, "__cuda_array_interface__", None)
    return (
        int(interface["data"][0] or 0) if interface is not None else cuda_region_of(tensor).address
    )


class DeviceMemory(NamedTuple):
    """Memory that the device has allocated, as a tensor that every framework with the CUDA array
    interface accepts.

    Attributes:
        address: the device's.
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


def addresses(
    device: CudaDevice,
    arena: Arena,
    blocks: NDArray[np.int64],
    slots: NDArray[np.int64],
    pieces: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of some pieces (indices in contract order) of n pairs: addresses on the device, addresses on
    the host, and bytes. Each is int64 of shape [n * len(pieces)], the pieces of a pair next to one
    another."""
    sizes = device.piece_bytes[pieces]
    on_device = device.regions[pieces] + blocks[:, None] * sizes
    on_host = arena.address + slots[:, None] * arena.stride + device.offsets[pieces]
    return on_device.ravel(), on_host.ravel(), np.broadcast_to(sizes, on_device.shape).ravel()


def checked_ids(
    device: Device, arena: Arena, blocks: Sequence[int], slots: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids as int64 arrays. ValueError for ids out of range, unequal lengths, or an arena whose
    slots are too small."""
    ids, places = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)
    if ids.ndim != 1 or ids.shape != places.shape:
        raise ValueError(f"{ids.size} blocks and {places.size} slots")
    for name, some, limit in (("block", ids, device.num_blocks), ("slot", places, arena.num_slots)):
        if some.size and not (some.min() >= 0 and some.max() < limit):
            raise ValueError(f"a {name} is out of range: there are {limit}")
    if arena.stride < device.piece_bytes.sum():
        raise ValueError(
            f"slots of {arena.stride} bytes are too small for blocks of {device.piece_bytes.sum()}"
        )
    return ids, places


def verify_memory(driver: CudaDriver, region: Region, ordinal: int) -> None:
    """DeviceError unless a region is memory of this GPU."""
    try:
        kind = driver.read_int("cuPointerGetAttribute", MEMORY_TYPE, region.address)
        found = driver.read_int("cuPointerGetAttribute", DEVICE_ORDINAL, region.address)
    except CudaError as error:
        raise DeviceError(
            f"a tensor of shape {list(region.shape)} is not in CUDA's memory: {error}"
        ) from error
    if kind != ON_DEVICE or found != ordinal:
        raise DeviceError(
            f"a tensor of shape {list(region.shape)} is not in the memory of GPU {ordinal}"
        )


class CudaDevice(Device):
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
        """The context is the primary one: the frameworks' own."""
        self.layout, self.ordinal, self.driver = layout, ordinal, driver
        self._undo = ExitStack()
        self._arenas: dict[int, int] = {}
        found = driver.read_int("cuDeviceGetCount")
        if not 0 <= ordinal < found:
            raise DeviceError(f"there is no GPU {ordinal}: the driver lists {found}")
        number = driver.read_int("cuDeviceGet", ordinal)
        self.name = driver.device_name(number)
        self.context = driver.read("cuDevicePrimaryCtxRetain", number)
        self._release_context = number
        self._closed = False
        try:
            with self.current():
                self._stream = driver.read("cuStreamCreate", NON_BLOCKING)
                self.undo("cuStreamDestroy", self._stream)
        except BaseException:
            self.close()
            raise

    def _make(self, shape: tuple[int, ...], dtype: str) -> DeviceMemory:
        size = int(np.prod(shape)) * ITEM_BYTES[dtype]
        address = self.driver.read("cuMemAlloc", size)
        self.undo("cuMemFree", address)
        return DeviceMemory(
            address, shape, next(typestr for typestr, name in TYPESTRS.items() if name == dtype)
        )

    def _take(self, tensors: list[Any]) -> None:
        self.tensors = tensors
        regions = [cuda_region_of(tensor) for tensor in tensors]
        self.num_blocks = regions[0].shape[0] if regions and regions[0].shape else 0
        if self.num_blocks < 1:
            raise LayoutError("a device needs at least 1 block")
        self.layout.verify([(region.shape, region.dtype) for region in regions], self.num_blocks)
        with self.current():
            for region in regions:
                verify_memory(self.driver, region, self.ordinal)
        self.regions = np.array([region.address for region in regions], np.int64)
        self.piece_bytes = np.array([piece.nbytes for piece in self.layout.pieces], np.int64)
        self.offsets = np.cumsum(self.piece_bytes) - self.piece_bytes

    # -- the context and pinned memory

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU's context the calling thread's. CudaError."""
        with self.driver.current(self.context):
            yield

    def undo(self, function: str, handle: int) -> None:
        """Call a function of the driver when the device is closed. A failure is only logged."""
        self._undo.callback(quietly, self.driver, function, handle)

    def register_arena(self, arena: Arena) -> int:
        """Pin an arena's memory and let the GPU address it, until `unregister_arena` or `close`;
        the address by which it does. Blocks for about a second a few gigabytes. CudaError."""
        if arena.address not in self._arenas:
            size = max(1, arena.num_slots) * arena.stride
            with self.current():
                self.driver.call("cuMemHostRegister", arena.address, size, PORTABLE | DEVICE_MAP)
                try:
                    self._arenas[arena.address] = self.driver.read(
                        "cuMemHostGetDevicePointer", arena.address, 0
                    )
                except CudaError:
                    quietly(self.driver, "cuMemHostUnregister", arena.address)
                    raise
        return self._arenas[arena.address]

    def unregister_arena(self, arena: Arena) -> None:
        """Unpin an arena, if it is pinned. No copy may be in flight, and the GPU's context must be
        current. Never raises."""
        if self._arenas.pop(arena.address, None) is not None:
            quietly(self.driver, "cuMemHostUnregister", arena.address)

    def abandon(self) -> None:
        """Make `close` release no memory: copies that never ended may still use it."""
        self._undo.pop_all()
        self._arenas.clear()
        self._closed = True

    def close(self) -> None:
        """Unpin arenas, free memory, release the context. Call it after the copy engine's `close`
        and before the arenas' `close`. Never raises."""
        if self._closed:
            return
        self._closed = True
        if self.driver.status("cuCtxPushCurrent", self.context):
            quietly(
                self.driver, "cuCtxPushCurrent", self.context
            )  # without a context no resource can be released: try once more
        for address in self._arenas:
            quietly(self.driver, "cuMemHostUnregister", address)
        self._undo.close()
        with suppress(CudaError):
            self.driver.read("cuCtxPopCurrent")
        quietly(self.driver, "cuDevicePrimaryCtxRelease", self._release_context)

    # -- copies

    def ensure_in_place(self) -> None:
        """DeviceError if a tensor has moved since it was registered: its framework has given the
        memory away."""
        for i, tensor in enumerate(self.tensors):
            if cuda_address_of(tensor) != self.regions[i]:
                piece = self.layout.pieces[i]
                raise DeviceError(
                    f"the tensor of layer {piece.layer}, {piece.role}, has moved since it was "
                    "registered"
                )

    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """See `Device`; DeviceError and CudaError besides. One driver call per piece:
        `CudaCopyEngine` is faster."""
        self._copy(False, blocks, arena, slots, None)

    def copy_to_device(
        self, blocks: Sequence[int], arena: Arena, slots: Sequence[int], layers: range | None = None
    ) -> None:
        """See `copy_to_host`."""
        self._copy(True, blocks, arena, slots, layers)

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
        on_device, on_host, sizes = addresses(
            self, arena, ids, places, np.arange(len(self.piece_bytes))[pieces]
        )
        self._transfer(to_device, on_device, on_host, sizes)

    def _transfer(
        self,
        to_device: bool,
        on_device: NDArray[np.int64],
        on_host: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> None:
        with self.current():
            try:
                self.driver.copy_singly(to_device, on_device, on_host, sizes, self._stream)
                self.driver.call("cuStreamSynchronize", self._stream)
            except CudaError:  # a copy that was begun ends before the caller has its memory back
                self.driver.settle(self.context, self._stream)
                raise

    def fill(self, blocks: Sequence[int], keys: bytes) -> None:
        """See `HostDevice.fill`. For tests and benchmarks, by way of the host."""
        memory = self._staged(len(blocks))
        regions = np.array([region.ctypes.data for region in memory], np.int64)
        fill_blocks(regions, self.piece_bytes, len(blocks), np.arange(len(blocks)), keys)
        self._stage(True, blocks, regions)

    def check(self, blocks: Sequence[int], keys: bytes) -> list[int]:
        """See `HostDevice.check`. For tests and benchmarks, by way of the host."""
        memory = self._staged(len(blocks))
        regions = np.array([region.ctypes.data for region in memory], np.int64)
        self._stage(False, blocks, regions)
        return check_blocks(regions, self.piece_bytes, len(blocks), np.arange(len(blocks)), keys)

    def _staged(self, count: int) -> list[NDArray[np.uint8]]:
        """Host memory for so many blocks, a region a piece."""
        return [np.zeros(max(1, count * int(size)), np.uint8) for size in self.piece_bytes]

    def _stage(self, to_device: bool, blocks: Sequence[int], regions: NDArray[np.int64]) -> None:
        ids = np.asarray(blocks, np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_blocks):
            raise ValueError(f"a block is out of range: there are {self.num_blocks}")
        sizes = np.broadcast_to(self.piece_bytes, (len(ids), len(regions)))
        on_device = self.regions + ids[:, None] * sizes
        on_host = regions + np.arange(len(ids))[:, None] * sizes
        self._transfer(to_device, on_device.ravel(), on_host.ravel(), sizes.ravel())


def quietly(driver: CudaDriver, function: str, handle: int) -> None:
    """Call a function of the driver that releases a resource. A failure is only logged, because the
    caller cannot correct it."""
    if code := driver.status(function, handle):
        log.warning(
            "the CUDA driver did not take something back", error=str(driver.error(function, code))
        )
