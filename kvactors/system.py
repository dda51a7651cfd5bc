"""Start, supervision and drain of one cache. `System` builds the actors in flow order, wires their
channels, supervises them and drains them.

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

import msgspec

from kvactors.actor import ActorRef, Group, InFlight, RestartBudget, Supervisor
from kvactors.actor.log import brief, get_logger
from kvactors.actor.uncancelled import ended, uncancelled
from kvactors.capacity import in_blocks, quotas_of
from kvactors.cpu_evictor.actor import CpuEvictor
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
from kvactors.flush_notifier.deliver import close_sink, open_sink
from kvactors.flush_notifier.messages import WaitFlushed
from kvactors.flush_notifier.sinks import Sink, make_sinks, require_sinks
from kvactors.fork import FORKED, SYSTEMS
from kvactors.gpu_swapper.actor import GpuSwapper
from kvactors.opening import Opening
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.policy import Clock
from kvactors.settings import Config, StorageConfig
from kvactors.shutdown import QUIET, STOP, Shutdown
from kvactors.storage.backend import Backend
from kvactors.storage.catalog import keep_quotas
from kvactors.storage.factory import object_bytes
from kvactors.summary import summarize
from kvactors.totals import Totals
from kvactors.wiring import Wiring

log = get_logger()


class System:
    """The parts of one cache. Nothing runs before `running()`.

    Args:
        config: the cache's settings.
        device: the device blocks, None for those that the config describes.
        sinks: sinks beside those of the config.
        backend: the store's back end in place of the config's.
        inline_copies: whether to copy in the loop's thread. Loops of virtual time need it, because
            they have no threads.
        clock: of the ages of blocks, the loop's if None.

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
        clock: Clock | None = None,
    ) -> None:
        self.layout = layout_for(config, device)
        config = config_for(config, device)
        self.storage = (
            StorageConfig(backend="none", write_policy="none")
            if config.flush.flush_only
            else config.storage
        )
        if self.storage.read_only:
            self.storage = msgspec.structs.replace(self.storage, write_policy="none")
        given = None if config.flush.flush_only else backend
        self.config = config = in_blocks(config, self.layout, self.storage, given)
        size = self.layout.block_bytes
        self.object_bytes = object_bytes(self.storage, size)
        self.quotas = quotas = quotas_of(config.quota, size, self.object_bytes)
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
        self.device_store = self.plane.device_store
        shares = None if self.store is None else self.store.shares
        if not config.flush.flush_only:  # no setting of the store has an effect then
            keep_quotas(quotas.storage, shares, self.storage.backend)
        require_sinks(config, sinks)
        made = [*make_sinks(config, self.layout, self.device if self.sized else None), *sinks]
        self.sinks = {sink.name: sink for sink in made}
        if len(self.sinks) < len(made):
            raise ConfigError("flush sinks need different names")
        self.in_flight = InFlight()
        self.supervisor = Supervisor(
            self.in_flight,
            RestartBudget(config.actors.max_restarts_per_minute),
            lambda: CacheClosed("the cache is closed"),
        )
        self.totals = Totals(quotas.counts)
        self.supervisor.on_replaced = self.totals.replaced
        self.shutdown = Shutdown(config.actors.drain_timeout_s, self.arena)
        self.forked = False
        self.sizing: asyncio.Task[None] | None = None  # `set_num_blocks` at work
        self.asleep = 0  # the level of the sleep
        self.opened_at = 0.0  # Unix time
        self.last_status = "ok"  # the last logged health status
        self.recordings: list[Any] = []  # open ones of `kvactors.record`
        # loop time at which each condition (component and reason) of the last `health` call began
        self.troubles: dict[tuple[str, str], float] = {}
        self.wiring = wiring = Wiring(
            config,
            self.storage,
            self.plane,
            self.sinks,
            self.layout.fingerprint,
            self.supervisor,
            clock,
            quotas=quotas,
        )
        self.roots = wiring.roots
        self.index, self.swapper, self.evictor = wiring.index, wiring.swapper, wiring.evictor
        self.readers, self.writers = wiring.readers, wiring.writers
        self.notifier = wiring.notifier

    @property
    def sized(self) -> bool:
        """Whether the number of device blocks is set."""
        return self.plane.device.num_blocks > 0

    def _groups(self) -> tuple[Group, Group]:
        return self.wiring.groups()

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
        async with self.plane.opened(
            Opening(self.config.actors.open_timeout_s, shutdown)
        ) as opened:
            await self._open_sinks(opened)
            opened.push_async_callback(shutdown.step, "device", self._end_sizing)
            drain, unused = self.config.actors.drain_timeout_s, self.wiring.unused()
            async with self.supervisor.running(*self._groups(), drain=drain, outside=unused):
                self.opened_at = time.time()
                log.info("cache opened", **summarize(self)._asdict())
                started.set_result(None)
                try:
                    clean = await leave
                    await uncancelled(self._drain(clean))
                finally:
                    failed = self.supervisor.failed is not None
                    log.info("cache closing", model=self.config.cache.model, failed=failed)
                    shutdown.begin()
                    self.supervisor.end_by = shutdown.at(STOP)
                    self.plane.abandon_pending()

    async def _end_sizing(self) -> None:
        if self.sizing is not None and not self.sizing.done():
            self.sizing.cancel()
            await asyncio.wait((self.sizing,))

    async def _open_sinks(self, opened: AsyncExitStack) -> None:
        step = Opening(self.config.actors.open_timeout_s, self.shutdown).step
        for sink in self.sinks.values():
            opened.push_async_callback(
                self.shutdown.step,
                f"sink {sink.name}",
                partial(close_sink, sink, self.config.flush.timeout_s),
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
        for ref in self.wiring.refs():
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
