"""The whole system in one page, for a first reading. `System` builds the actors in flow order,
wires their channels, supervises them and drains them.

    KVCache -> PrefixIndex -> CpuEvictor -> GpuSwapper       copies between device and host arena
                    |              |
                    |              +------> StorageReader, StorageWriter (pools)
                    |              |                |
                    +--------------+----------------+-> FlushNotifier -> sinks

Arrows are bounded data lanes and form no cycle. Completions travel back on the control lanes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from kvactors.actor import Actor, ActorRef, ActorSpec, Group, InFlight, RestartBudget, Supervisor
from kvactors.actor.log import get_logger
from kvactors.actor.supervisor import brief
from kvactors.actor.uncancelled import ended, uncancelled
from kvactors.config import Config, StorageConfig
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.messages import HostReply, HostRequest
from kvactors.data_plane.local import LocalPlane, make_local_plane
from kvactors.data_plane.ranks.plane import RanksPlane, make_ranks_plane
from kvactors.device import config_for, layout_for
from kvactors.device.base import Device
from kvactors.errors import (
    CacheClosed,
    CacheFailed,
    ConfigError,
    KVActorsError,
    SinkError,
)
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.messages import Report, WaitFlushed
from kvactors.flush_notifier.sink_calls import close_sink, open_sink
from kvactors.flush_notifier.sinks import Sink, make_sinks, require_sinks
from kvactors.fork import FORKED, SYSTEMS
from kvactors.gpu_swapper.actor import GpuSwapper
from kvactors.gpu_swapper.messages import Copy, CopyReply, DataPlaneStatus
from kvactors.identity import CacheScope
from kvactors.opening import Opening
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import IndexRequest
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.settings import IndexSettings
from kvactors.shutdown import QUIET, STOP, Shutdown
from kvactors.storage.backends import Backend
from kvactors.storage.device_store import StorageDirect
from kvactors.storage.messages import DeviceStoreMessage, ReaderMessage, StorageReply, WriterMessage
from kvactors.storage.reader import StorageReader
from kvactors.storage.writer import StorageWriter
from kvactors.substitutes import NoDirect, NoNotifier, NoReader, NoWriter

log = get_logger()

FORGOTTEN = 1024
"""Blocks that PrefixIndex and FlushNotifier each track beyond the capacity of the tiers."""


class System:
    """The parts of one cache. Nothing runs before `running()`.

    Args:
        config: the cache's settings.
        device: the device blocks, None for those that the config describes.
        sinks: sinks beside those of the config.
        backend: the store's back end in place of the config's.
        inline_copies: whether to copy in the loop's thread. Loops of virtual time need it, because
            they have no threads.

    Raises:
        ConfigError: the settings, devices, stores or sinks do not fit together.
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
        self.layout = layout_for(config, device)
        self.config = config = config_for(config, device)
        self.storage = (
            StorageConfig(backend="none", write_policy="none")
            if config.flush.only
            else config.storage
        )
        self.plane: LocalPlane | RanksPlane
        if config.ranks.count > 1:
            if device is not None or backend is not None:
                raise ConfigError(
                    "with ranks.count above 1, devices and stores belong to the ranks: give them "
                    "to serve_rank"
                )
            self.plane = make_ranks_plane(config, self.storage, self.layout)
        else:
            self.plane = make_local_plane(
                config, self.storage, self.layout, device, backend, inline=inline_copies
            )
        self.ranks = self.plane.group if isinstance(self.plane, RanksPlane) else None
        self.device = self.plane.device
        self.arena: Any = self.plane.slots
        self.backend, self.store = self.plane.backend, self.plane.store
        self.direct_backend = self.plane.device_store
        require_sinks(config, sinks)
        made = [*make_sinks(config, self.layout, self.device), *sinks]
        self.sinks = {sink.name: sink for sink in made}
        if len(self.sinks) < len(made):
            raise ConfigError("flush sinks need different names")
        self.in_flight = InFlight()
        self.supervisor = Supervisor(
            self.in_flight,
            RestartBudget(config.actors.restarts),
            lambda: CacheClosed("the cache is closed"),
        )
        self.shutdown = Shutdown(config.actors.drain, self.arena)
        self.forked = False
        self.last_status = "ok"  # the last logged health status
        # loop time at which each condition (component and reason) of the last `health` call began
        self.troubles: dict[tuple[str, str], float] = {}
        self.epoch = time.time_ns() // 1_000_000
        self.roots = Roots(config.cache.model, config.cache.namespace, self.layout.fingerprint)
        self.token_root = CacheScope(config.cache.model, config.cache.namespace).root(
            self.layout.fingerprint
        )
        self._make_refs()

    def _make_refs(self) -> None:
        bound, pool = (
            self.config.actors.channel_bound,
            self.storage if self.backend is not None else None,
        )
        ref = self.supervisor.make_ref
        self.index: ActorRef[HostReply | DataPlaneStatus | IndexRequest] = ref(PrefixIndex, bound)
        self.swapper: ActorRef[Copy] = ref(GpuSwapper, bound)
        self.evictor: ActorRef[HostRequest | CopyReply | StorageReply] = ref(CpuEvictor, bound)
        self.readers: list[ActorRef[ReaderMessage]] = [
            ref(StorageReader, bound, name=f"storage_reader-{i}")
            for i in range(pool.readers if pool else 0)
        ]
        self.direct: ActorRef[DeviceStoreMessage] | None = None
        if self.direct_backend is not None:
            self.direct = ref(StorageDirect, bound)
        self.writers: list[ActorRef[WriterMessage]] = [
            ref(StorageWriter, bound, name=f"storage_writer-{i}")
            for i in range(pool.writers if pool else 0)
        ]
        self.notifier: ActorRef[Report] = ref(FlushNotifier, bound)

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
            memory_generation=self.plane.generation,
        )
        settings = IndexSettings(
            exclusive=exclusive,
            host_tier=host_tier,
            fetch=stored and storage.fetch,
            announce=bool(self.sinks),
            announce_whole=any(sink.announces_full for sink in self.sinks.values()),
            free_low=int(config.device.free_low * blocks),
            free_high=int(config.device.free_high * blocks),
            save=storage.write_policy if stored else "none",
            min_hits=storage.min_hits,
            token_root=self.token_root if self.direct is not None else None,
            keep_lineages=self.store is not None and self.store.keeps_lineages,
        )
        return PrefixIndex(
            ref,
            index=index,
            evictor=self.evictor,
            notifier=self.notifier,
            roots=self.roots,
            settings=settings,
        )

    def _make_swapper(self, ref: ActorRef) -> GpuSwapper:
        return GpuSwapper(ref, plane=self.plane, evictor=self.evictor, index=self.index)

    def _make_evictor(self, ref: ActorRef) -> CpuEvictor:
        return CpuEvictor(
            ref,
            config=self.config.host,
            storage=self.storage,
            arena=self.arena,
            index=self.index,
            swapper=self.swapper,
            readers=self.readers,
            writers=self.writers,
            notifier=self.notifier,
            direct=self.direct,
            layerwise=self.config.device.layerwise,
            memory_generation=self.plane.generation,
        )

    def _make_reader(
        self, ref: ActorRef, kind: type[StorageReader | NoReader] = StorageReader
    ) -> StorageReader | NoReader:
        assert self.store is not None
        return kind(
            ref, backend=self.store, plane=self.plane, evictor=self.evictor, notifier=self.notifier
        )

    def _make_writer(
        self, ref: ActorRef, kind: type[StorageWriter | NoWriter] = StorageWriter
    ) -> StorageWriter | NoWriter:
        assert self.store is not None
        root_of = self.roots.root if self.sinks else None
        return kind(
            ref,
            backend=self.store,
            plane=self.plane,
            evictor=self.evictor,
            notifier=self.notifier,
            root_of=root_of,
        )

    def _make_direct(
        self, ref: ActorRef, kind: type[StorageDirect | NoDirect] = StorageDirect
    ) -> StorageDirect | NoDirect:
        assert self.direct_backend is not None
        return kind(ref, backend=self.direct_backend, plane=self.plane, evictor=self.evictor)

    def _make_notifier(self, ref: ActorRef) -> FlushNotifier:
        return FlushNotifier(
            ref,
            block_size=self.config.cache.block_size,
            sinks=list(self.sinks.values()),
            config=self.config.flush,
            epoch=self.epoch,
            idle_limit=self.device.num_blocks + self.arena.num_slots + FORGOTTEN,
            token_root=self.token_root,
            root_of=self.roots.of,
            namespace=self.roots.namespace,
        )

    def _members(self) -> tuple[Group, Group]:
        """The groups of actors that restart together.

        Slots and device blocks are shared memory. An actor that may still write to them restarts
        with the actor that hands them out, so that no copy of an earlier incarnation writes to a
        later one's blocks. An optional actor has a substitute.
        """
        no_reader, no_writer = (
            partial(self._make_reader, kind=NoReader),
            partial(self._make_writer, kind=NoWriter),
        )
        no_direct = partial(self._make_direct, kind=NoDirect)
        no_notifier = partial(
            NoNotifier, block_size=self.config.cache.block_size, config=self.config.flush
        )
        readers = [
            Group(ref.name, (ActorSpec(StorageReader, self._make_reader, ref, no_reader),))
            for ref in self.readers
        ]
        writers = [
            Group(ref.name, (ActorSpec(StorageWriter, self._make_writer, ref, no_writer),))
            for ref in self.writers
        ]
        swapper = ActorSpec(GpuSwapper, self._make_swapper, self.swapper)
        evictor = ActorSpec(CpuEvictor, self._make_evictor, self.evictor)
        refs = () if self.direct is None else (self.direct,)
        direct = [
            Group(ref.name, (ActorSpec(StorageDirect, self._make_direct, ref, no_direct),))
            for ref in refs
        ]
        plane = Group("data plane", (swapper, evictor, *readers, *writers, *direct))
        core = Group("core", (ActorSpec(PrefixIndex, self._make_index, self.index), plane))
        notifier = Group(
            "notifier", (ActorSpec(FlushNotifier, self._make_notifier, self.notifier, no_notifier),)
        )
        return core, notifier

    @asynccontextmanager
    async def running(self) -> AsyncIterator[System]:
        """Open the store and the sinks, touch the arena and run the actors until the block ends.

        At the end of the block the system drains, delivers pending events to the sinks, stops the
        actors in reverse and closes every part. If a part does not open, the parts opened before it
        are closed and the error is raised.

        All steps run in a separate task, so that no cancellation of the caller interrupts one. The
        cancellation is raised when the system has ended.

        Raises:
            CacheFailed: the system has failed, raised at the end of the block.
        """
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        leave: asyncio.Future[bool] = loop.create_future()
        task = loop.create_task(self._run(started, leave), name="kvactors system")
        SYSTEMS.add(self)
        try:
            await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                task.result()
            yield self
        except BaseException as error:
            await self._leave(task, started, leave, clean=False)
            if (failure := self.supervisor.failure()) is not None and not isinstance(
                error, CacheFailed
            ):
                error.add_note(str(failure))
            raise
        await self._leave(task, started, leave, clean=True)
        if (failure := self.supervisor.failure()) is not None:
            raise failure

    async def _leave(
        self,
        task: asyncio.Task[None],
        started: asyncio.Future[None],
        leave: asyncio.Future[bool],
        *,
        clean: bool,
    ) -> None:
        if self.forked:
            return
        if not task.done():
            self.shutdown.begin()
            if started.done():
                if not leave.done():  # an ending `asyncio.run` cancels this task too
                    leave.set_result(clean)
            else:
                task.cancel()
        await ended(task)
        SYSTEMS.discard(self)
        if started.done() and not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of the cache failed", error=brief(error))

    async def _run(self, started: asyncio.Future[None], leave: asyncio.Future[bool]) -> None:
        shutdown = self.shutdown
        async with self.plane.opened(Opening(self.config.actors.start, shutdown)) as opened:
            await self._open_sinks(opened)
            unused: tuple[type[Actor], ...] = (
                () if self.backend is not None else (StorageReader, StorageWriter)
            )
            unused += () if self.direct is not None else (StorageDirect,)
            drain = self.config.actors.drain
            async with self.supervisor.running(*self._members(), drain=drain, outside=unused):
                started.set_result(None)
                try:
                    clean = await leave
                    await uncancelled(self._drain(clean))
                finally:
                    shutdown.begin()
                    self.supervisor.end_by = shutdown.at(STOP)
                    self.plane.abandon_pending()

    async def _open_sinks(self, opened: AsyncExitStack) -> None:
        step = Opening(self.config.actors.start, self.shutdown).step
        for sink in self.sinks.values():
            opened.push_async_callback(
                self.shutdown.step,
                f"sink {sink.name}",
                partial(close_sink, sink, self.config.flush.timeout),
            )
            await step(
                f"sink {sink.name!r}", partial(open_sink, sink), SinkError, sink.ready_timeout
            )

    async def _drain(self, clean: bool) -> None:
        """Wait until nothing is in flight.

        Args:
            clean: whether the block ended without an error. Then this also waits until the sinks
                that respond have received the pending events.
        """
        self.shutdown.begin()
        if self.supervisor.failed is not None:
            return
        limit = self.shutdown.at(QUIET)
        if self.store is not None:
            self.store.end_paths()
        await self.supervisor.drain(self.shutdown.left(QUIET))
        if clean:
            with suppress(KVActorsError):
                await self.notifier.ask(WaitFlushed(healthy=True), deadline=limit)

    def check_usable(self) -> None:
        """Check that calls can be served.

        Raises:
            CacheFailed: the system has failed.
            CacheClosed: this process was forked from the one that opened the system.
        """
        if self.forked:
            raise CacheClosed(FORKED)
        if self.supervisor.failed is not None:
            raise CacheFailed(self.supervisor.failed_actor, self.supervisor.failed)

    def close_in_child(self) -> None:
        """Refuse every call in a forked child, which lacks the system's threads and loop."""
        self.forked = self.shutdown.forked = self.shutdown.waits.over = True
        self.supervisor.end_by = 0.0
        refs: tuple[ActorRef, ...] = (
            self.index,
            self.swapper,
            self.evictor,
            *self.readers,
            *self.writers,
            self.notifier,
        )
        for ref in refs:
            ref.channel.refuse(lambda: CacheClosed(FORKED))

    # -- the current incarnations, for inspection

    def _actor(self, ref: ActorRef) -> Any:
        return self.supervisor.actor(ref.name)

    @property
    def index_actor(self) -> PrefixIndex:
        """PrefixIndex's current incarnation."""
        return self._actor(self.index)  # type: ignore[no-any-return]

    @property
    def evictor_actor(self) -> CpuEvictor:
        """CpuEvictor's current incarnation."""
        return self._actor(self.evictor)  # type: ignore[no-any-return]

    @property
    def swapper_actor(self) -> GpuSwapper:
        """GpuSwapper's current incarnation."""
        return self._actor(self.swapper)  # type: ignore[no-any-return]

    @property
    def notifier_actor(self) -> FlushNotifier:
        """FlushNotifier's current incarnation."""
        return self._actor(self.notifier)  # type: ignore[no-any-return]
