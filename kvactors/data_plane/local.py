"""The data plane of this process: its device, its arena, its store, and a copy engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

from kvactors.attention_sdk import gpu_of
from kvactors.data_plane.base import DataPlane, Direction, EngineStreams, Progress
from kvactors.data_plane.engine import CopyEngine, InlineCopies, NoCopies, ThreadedCopies
from kvactors.device.arena import Arena, bring_in
from kvactors.device.base import Device, DeviceBlocks
from kvactors.device.host import HostDevice
from kvactors.errors import ConfigError, DeviceError, StoreError
from kvactors.layout.base import Layout
from kvactors.lifecycle import Opening
from kvactors.settings import Config, DeviceConfig, HostConfig, StorageConfig
from kvactors.settings.check import changed_in
from kvactors.storage.backend import Backend
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.factory import make_device_store, make_store

# -- The device that a config describes.


def make_device(config: DeviceConfig, layout: Layout) -> Device:
    """Make the device that `[device]` describes."""
    if config.kind == "paddle":
        return _paddle_device(layout, config.num_blocks, config.place)
    if config.kind == "cuda":
        from kvactors.data_plane.cuda.device import CudaDevice

        return CudaDevice.allocate(layout, config.num_blocks, ordinal=config.ordinal)
    return HostDevice(layout, config.num_blocks)


def _paddle_device(layout: Layout, num_blocks: int, place: str) -> Device:
    from kvactors.device.paddle import PaddleDevice, allocator

    kind, _, number = place.partition(":")
    if kind == "cpu":
        return PaddleDevice.allocate(layout, num_blocks, place)
    from kvactors.data_plane.cuda.device import CudaDevice

    return CudaDevice(
        layout, layout.allocate(allocator(place), num_blocks), ordinal=int(number or 0)
    )


class LocalPlane(DataPlane):
    """Its memory is lost only with the process, or with the GPU's context: then it copies nothing
    any more. So its memory generation never changes."""

    def __init__(
        self,
        device: DeviceBlocks,
        arena: Arena,
        make_engine: Callable[[Device], CopyEngine],
        backend: Backend | None = None,
        device_store: DeviceStore | None = None,
        *,
        store_timeout: float,
        inline: bool = False,
        owns_device: bool = False,
    ) -> None:
        super().__init__(device, arena, backend, device_store, store_timeout=store_timeout)
        self.arena = arena
        self.make_engine = make_engine
        self._use(make_engine(device) if isinstance(device, Device) else NoCopies())
        self.inline = inline
        self.owns_device = owns_device

    def _use(self, engine: CopyEngine) -> None:
        self.engine = engine
        engine.broke = lambda lost: self.report_status(lost=lost)

    @property
    def trouble(self) -> str:
        return self.engine.trouble

    def statistics(self) -> Any:
        return self.engine.statistics()

    def abandon_pending(self) -> None:
        self.engine.abandon_pending()

    async def copy_pairs(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        return await self.engine.run(direction, blocks, slots, progress)

    @property
    def streams(self) -> EngineStreams:
        return self.engine

    def set_device(self, device: Device, engine: CopyEngine, *, owned: bool) -> None:
        """Take the device of a plane that was opened without one, and its open engine. owned: the
        plane closes the device at its end."""
        self.device, self.owns_device = device, owned
        self._use(engine)
        if not self.available:
            self.report_status(lost=False)

    async def _open(self, stack: AsyncExitStack, opening: Opening) -> None:
        stack.push_async_callback(opening.shutdown.step, "copy engine", lambda: self.engine.close())
        await self._open_stores(stack, opening)
        await bring_in(self.arena.fresh, inline=self.inline)
        if self.owns_device:
            await bring_in(self.device.fresh, inline=self.inline)
        if self.store is not None:
            size, object_bytes = self.arena.block_bytes, self.store.block_bytes
            if object_bytes != size:
                raise StoreError(
                    f"the store has objects of {object_bytes} bytes, and the layout has blocks of "
                    f"{size} bytes: make the store for those"
                )
            await opening.step("store", partial(self.store.attach, self.arena), StoreError)
        await opening.step("copy engine", self.engine.open, DeviceError)

    def _free(self) -> None:
        if self.owns_device and not self.arena.kept:
            self.device.close()
        self.arena.close()


def make_local_plane(
    config: Config,
    storage: StorageConfig,
    layout: Layout,
    device: Device | None = None,
    backend: Backend | None = None,
    *,
    shard: tuple[int, int] | None = None,
    inline: bool = False,
    block_size: int = 0,
) -> LocalPlane:
    """Make the data plane that a config describes. device, backend: in place of the config's. The
    caller closes the device, and the back end is not used in flush-only mode. shard: rank and
    number of ranks, if this process is one of several. inline: copy in the loop's thread, for loops
    of virtual time. block_size: tokens that the store keeps beside a block, 0 for the config's."""
    owned = device is None
    blocks: DeviceBlocks
    if device is not None:
        blocks = device
    elif config.device.num_blocks:
        blocks = make_device(config.device, layout)
    else:
        blocks = DeviceBlocks("host" if gpu_of(config, None) is None else "cuda", layout, 0)
    with ExitStack() as made:
        if owned:
            made.callback(blocks.close)
        check_copy_settings(blocks.kind, config.host)
        if backend is None or config.flush.flush_only:
            first = shard is None or shard[0] == 0  # rank, which keeps lineages for all
            kept = (block_size or config.cache.block_size) if first else 0
            backend = make_store(storage, config.cache.model, layout, kept)
        device_store = make_device_store(config, blocks, shard)
        arena = Arena(
            config.host.arena_slots(stored=backend is not None),
            layout.block_bytes,
            pinned=config.host.pinned and blocks.kind != "cuda",
            trailer=0 if backend is None else backend.slot_trailer_bytes,
            numa_node=config.host.numa_node,
        )
        made.pop_all()
    return LocalPlane(
        blocks,
        arena,
        lambda device: make_engine(device, arena, config.host, inline=inline),
        backend,
        device_store,
        store_timeout=config.storage.timeout_s,
        inline=inline,
        owns_device=owned,
    )


def check_copy_settings(kind: str, config: HostConfig) -> None:
    """ConfigError that names a setting of copies that is given and has no use with this device. An
    engine may pass its own device, so `device.kind` alone does not decide."""
    on_gpu = kind == "cuda"
    name = "copy_threads" if on_gpu else "dma_min_bytes"
    if name in changed_in(config):
        where = "with" if on_gpu else "without"
        raise ConfigError(f"host.{name} has no use {where} a CUDA device: remove it")


def make_engine(device: Device, arena: Arena, config: HostConfig, *, inline: bool) -> CopyEngine:
    """Make the copy engine for a device of this process. `inline` copies in the loop's thread."""
    if inline:
        return InlineCopies(device, arena)
    if device.kind == "cuda":
        from kvactors.data_plane.cuda.device import CudaDevice
        from kvactors.data_plane.cuda.engine import CudaCopyEngine

        if not isinstance(device, CudaDevice):
            raise DeviceError(f"a device of kind 'cuda' is no {type(device).__name__}")
        return CudaCopyEngine(device, arena, batch_from=config.dma_min_bytes)
    return ThreadedCopies(device, arena, config.copy_threads)
