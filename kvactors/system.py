"""READ THIS FIRST: the whole system in one page. Builds the actors in flow order, wires their channels, supervises them, drains them.

    door -> PrefixIndex -> CpuEvictor -> GpuSwapper          copies between device and host arena
                 |              |
                 |              +------> StorageReader, StorageWriter (pools)
                 |              |                |
                 +--------------+----------------+-> FlushNotifier -> sinks

Arrows are bounded data lanes and form no cycle; completions travel back on the control lanes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio.to_thread

from kvactors.actor import Activity, Actor, ActorRef, ActorSpec, Group, RestartBudget, Supervisor
from kvactors.actor.clock import deadline_after
from kvactors.config import Config, StorageConfig
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.device import make_device
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.device.remote import RanksArena, RanksDevice
from kvactors.errors import ConfigError, KVActorsError, LayoutError
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.deliveries import close_sink, open_sink
from kvactors.flush_notifier.messages import Settle
from kvactors.flush_notifier.sinks import Sink, make_sinks
from kvactors.gpu_swapper.actor import GpuSwapper
from kvactors.gpu_swapper.executor import Executor, make_executor
from kvactors.gpu_swapper.remote import RemoteExecutor
from kvactors.layout import make_layout
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.index import BlockIndex
from kvactors.ranks.group import RankGroup
from kvactors.storage.backends import Backend, make_backend, make_direct
from kvactors.storage.backends.direct import DirectBackend
from kvactors.storage.backends.ranks import RankBackend
from kvactors.storage.direct import StorageDirect
from kvactors.storage.reader import StorageReader
from kvactors.storage.writer import StorageWriter

FORGOTTEN = 1024
"""Blocks that PrefixIndex and FlushNotifier each remember beyond those that the tiers can hold."""


class System:
    """The parts of one cache. Nothing runs before `running()`.

    sinks: beside those of the config. backend: in place of the config's.
    inline_copies: copy in the loop's own thread (for loops of virtual time, which have no threads).
    """

    def __init__(
        self,
        config: Config,
        device: Device | None = None,
        sinks: Sequence[Sink] = (),
        backend: Backend | None = None,
        *,
        inline_copies: bool = False,
    ) -> None:
        self.config = config
        self.layout = device.layout if device is not None else make_layout(config.layout, config.cache.block_size)
        if self.layout.block_size != config.cache.block_size:
            raise LayoutError(
                f"the device's blocks hold {self.layout.block_size} tokens, cache.block_size is {config.cache.block_size}"
            )
        self.storage = StorageConfig(backend="none", write_policy="none") if config.flush.only else config.storage
        self.inline = inline_copies
        self.ranks: RankGroup | None = None
        self.device: Device
        self.arena: Arena
        self.executor: Executor
        self.backend: Backend | None
        self.direct_backend: DirectBackend | None
        if config.ranks.count > 1:
            self._make_remote(device, backend)
        else:
            self._make_local(device, backend)
        made = [*make_sinks(config, self.layout), *sinks]
        self.sinks = {sink.name: sink for sink in made}
        if len(self.sinks) < len(made):
            raise ConfigError("flush sinks need different names")
        self.activity = Activity()
        self.supervisor = Supervisor(self.activity, RestartBudget(config.actors.restarts))
        self.epoch = time.time_ns() // 1_000_000
        self._make_refs()

    def _make_local(self, device: Device | None, backend: Backend | None) -> None:
        """The data plane in this process."""
        config = self.config
        self.device = device if device is not None else make_device(config.device, self.layout)
        self._own_device = device is None
        self.backend = backend
        if backend is None or config.flush.only:
            self.backend = make_backend(self.storage, config.cache.model, self.layout.fingerprint, self.layout.block_bytes)
        self.direct_backend = make_direct(config, self.device)
        slots = config.host.arena_slots(stored=self.backend is not None)
        trailer = self.backend.trailer if self.backend is not None else 0
        self.arena = Arena(
            slots, self.layout.block_bytes, pinned=config.host.pinned and self.device.kind != "cuda", trailer=trailer
        )
        self.executor = make_executor(self.device, self.arena, config.host, inline=self.inline)

    def _make_remote(self, device: Device | None, backend: Backend | None) -> None:
        """The data plane in the ranks' processes."""
        config, layout = self.config, self.layout
        if device is not None or backend is not None:
            raise ConfigError("with ranks.count above 1, devices and stores belong to the ranks: give them to serve_rank")
        stored = self.storage.backend != "none"
        slots = config.host.arena_slots(stored=stored)
        self._own_device = True
        self.device = RanksDevice(layout, config.device.num_blocks)
        self.arena = RanksArena(slots, layout.block_bytes)
        self.ranks = RankGroup(config.ranks, layout.fingerprint, config.device.num_blocks, slots)
        self.executor = RemoteExecutor(self.device, self.arena, self.ranks)
        self.direct_backend, self.backend = None, None
        if stored:
            self.backend = RankBackend(
                self.ranks,
                layout.fingerprint,
                layout.block_bytes,
                self.storage.timeout,
                exclusive=self.storage.exclusive,
                shared=self.storage.backend == "mooncake",
            )

    def _make_refs(self) -> None:
        bound, pool = self.config.actors.channel_bound, self.storage if self.backend is not None else None
        ref = self.supervisor.make_ref
        self.index = ref(PrefixIndex, bound)
        self.swapper = ref(GpuSwapper, bound)
        self.evictor = ref(CpuEvictor, bound)
        self.readers = [ref(StorageReader, bound, name=f"storage_reader-{i}") for i in range(pool.readers if pool else 0)]
        self.direct = None if self.direct_backend is None else ref(StorageDirect, bound)
        self.writers = [ref(StorageWriter, bound, name=f"storage_writer-{i}") for i in range(pool.writers if pool else 0)]
        self.notifier = ref(FlushNotifier, bound)

    # -- the factories, in flow order

    def _make_index(self, ref: ActorRef) -> PrefixIndex:
        config, host, storage = self.config, self.config.host, self.storage
        stored = self.backend is not None or self.direct is not None
        host_tier = host.slots > 0 or (stored and storage.write_policy == "write_back")
        exclusive = host.mode == "exclusive" or not host.slots
        blocks = self.device.num_blocks
        index = BlockIndex(
            config.cache.block_size,
            blocks,
            blocks + host.slots + FORGOTTEN,
            recompute_last_token=config.cache.recompute_last_token,
        )
        return PrefixIndex(
            ref, index=index, evictor=self.evictor, notifier=self.notifier, exclusive=exclusive, host_tier=host_tier,
            fetch=stored and storage.fetch, announce=bool(self.sinks), free_low=int(config.device.free_low * blocks),
            free_high=int(config.device.free_high * blocks), save=storage.write_policy if stored else "none",
            by_tokens=self.direct is not None, min_hits=storage.min_hits, keep=not exclusive, namespace=config.cache.namespace,
            era=self.executor.era,
        )  # fmt: skip

    def _make_swapper(self, ref: ActorRef) -> GpuSwapper:
        return GpuSwapper(ref, executor=self.executor, evictor=self.evictor, index=self.index)

    def _make_evictor(self, ref: ActorRef) -> CpuEvictor:
        return CpuEvictor(
            ref, config=self.config.host, storage=self.storage, arena=self.arena, index=self.index, swapper=self.swapper,
            readers=self.readers, writers=self.writers, notifier=self.notifier, direct=self.direct,
            layerwise=self.config.device.layerwise,
            era=self.executor.era,
        )  # fmt: skip

    def _make_reader(self, ref: ActorRef) -> StorageReader:
        assert self.backend is not None
        return StorageReader(ref, backend=self.backend, arena=self.arena, evictor=self.evictor, notifier=self.notifier)

    def _make_writer(self, ref: ActorRef) -> StorageWriter:
        assert self.backend is not None
        return StorageWriter(ref, backend=self.backend, arena=self.arena, evictor=self.evictor, notifier=self.notifier)

    def _make_direct(self, ref: ActorRef) -> StorageDirect:
        assert self.direct_backend is not None
        return StorageDirect(ref, backend=self.direct_backend, evictor=self.evictor)

    def _make_notifier(self, ref: ActorRef) -> FlushNotifier:
        return FlushNotifier(
            ref, block_size=self.config.cache.block_size, sinks=list(self.sinks.values()), config=self.config.flush,
            epoch=self.epoch,
            limbo=self.device.num_blocks + self.arena.num_slots + FORGOTTEN,
        )  # fmt: skip

    def _members(self) -> tuple[Group, Group]:
        """Who restarts with whom. Slots and device blocks are shared memory: whoever may still write to them goes down with the one
        that hands them out, so that no copy of an earlier life touches a later one's blocks."""
        readers = [Group(ref.name, (ActorSpec(StorageReader, self._make_reader, ref),)) for ref in self.readers]
        writers = [Group(ref.name, (ActorSpec(StorageWriter, self._make_writer, ref),)) for ref in self.writers]
        swapper = ActorSpec(GpuSwapper, self._make_swapper, self.swapper)
        evictor = ActorSpec(CpuEvictor, self._make_evictor, self.evictor)
        refs = () if self.direct is None else (self.direct,)
        direct = [Group(ref.name, (ActorSpec(StorageDirect, self._make_direct, ref),)) for ref in refs]
        plane = Group("data plane", (swapper, evictor, *readers, *writers, *direct))
        core = Group("core", (ActorSpec(PrefixIndex, self._make_index, self.index), plane))
        notifier = Group("notifier", (ActorSpec(FlushNotifier, self._make_notifier, self.notifier),))
        return core, notifier

    @asynccontextmanager
    async def running(self) -> AsyncIterator[System]:
        """Open the store and the sinks, touch the arena, run the actors; on the way out drain, tell the sinks that take it what is still
        due, stop in reverse and close everything. What cannot be opened is an error, and what was opened before it is closed."""
        try:
            async with AsyncExitStack() as opened:
                await self._open(opened)
                drain = self.config.actors.drain
                unused: tuple[type[Actor], ...] = () if self.backend is not None else (StorageReader, StorageWriter)
                unused += () if self.direct is not None else (StorageDirect,)
                async with self.supervisor.running(*self._members(), drain=drain, outside=unused):
                    try:
                        yield self
                        with anyio.CancelScope(shield=True):
                            await self._last_words(drain)
                    except BaseException:
                        with anyio.CancelScope(shield=True):
                            await self.supervisor.drain(drain if self.supervisor.failed is None else 0)
                        raise
                    finally:
                        self.executor.release()
        finally:
            self.arena.close()

    async def _open(self, opened: AsyncExitStack) -> None:
        if self._own_device:
            opened.callback(self.device.close)
        opened.push_async_callback(shielded, self.executor.close)
        if self.ranks is not None:
            await self.ranks.open()
            opened.push_async_callback(shielded, self.ranks.close)
        if self.backend is not None:
            await self.backend.open()
            opened.push_async_callback(shielded, self.backend.close)
        if self.direct_backend is not None:
            await self.direct_backend.open()
            opened.push_async_callback(shielded, self.direct_backend.close)
        for sink in self.sinks.values():
            await open_sink(sink)
            opened.push_async_callback(shielded, partial(close_sink, sink, self.config.flush.timeout))
        if self.inline:
            self.arena.touch()
        else:
            await anyio.to_thread.run_sync(self.arena.touch)
        if self.backend is not None:
            await self.backend.attach(self.arena)
        await self.executor.open()

    async def _last_words(self, limit: float) -> None:
        at = deadline_after(limit)
        await self.supervisor.drain(limit)
        with suppress(KVActorsError):
            await self.notifier.ask(Settle(healthy=True), deadline=at)

    # -- the present lives, for inspection

    def _actor(self, ref: ActorRef) -> Any:
        return self.supervisor.actor(ref.name)

    @property
    def index_actor(self) -> PrefixIndex:
        """PrefixIndex as it is now."""
        return self._actor(self.index)  # type: ignore[no-any-return]

    @property
    def evictor_actor(self) -> CpuEvictor:
        """CpuEvictor as it is now."""
        return self._actor(self.evictor)  # type: ignore[no-any-return]

    @property
    def swapper_actor(self) -> GpuSwapper:
        """GpuSwapper as it is now."""
        return self._actor(self.swapper)  # type: ignore[no-any-return]

    @property
    def notifier_actor(self) -> FlushNotifier:
        """FlushNotifier as it is now."""
        return self._actor(self.notifier)  # type: ignore[no-any-return]


async def shielded(close: Callable[[], Awaitable[None]], limit: float = float("inf")) -> None:
    """Close something whatever is cancelled around it, in `limit` seconds at most."""
    with anyio.move_on_after(limit, shield=True):
        await close()
