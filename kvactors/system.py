"""Wiring, start, supervision and drain of one cache. `System` builds the actors in flow order,
wires their channels, supervises them and drains them.

    KVCache -> PrefixIndex -> CpuEvictor -> GpuSwapper       copies between device and host arena
                    |              |
                    |              +------> StorageReader, StorageWriter (pools)
                    |              |                |
                    +--------------+----------------+-> FlushNotifier -> sinks

Arrows are bounded data lanes and form no cycle. Completions travel back on the control lanes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvactors.actor import (
    Actor,
    ActorRef,
    ActorSpec,
    Group,
    InFlight,
    RestartBudget,
    Supervisor,
    counters_of,
)
from kvactors.actor.clock import clock_of
from kvactors.actor.log import described, get_logger
from kvactors.actor.uncancelled import ended, uncancelled
from kvactors.capacity import in_blocks, quotas_of
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.messages import EmptyHost, HostReply, HostRequest
from kvactors.cpu_evictor.requests import Peers
from kvactors.cpu_evictor.slots import HostShares
from kvactors.data_plane.local import LocalPlane, make_local_plane
from kvactors.data_plane.ranks.plane import RanksPlane, make_ranks_plane
from kvactors.device import config_for, layout_for
from kvactors.device.base import Device
from kvactors.errors import CacheClosed, CacheFailed, ConfigError, KVActorsError, SinkError
from kvactors.flush_notifier.actor import FlushNotifier, NoNotifier
from kvactors.flush_notifier.deliver import SinkStatistics, close_sink, open_sink
from kvactors.flush_notifier.messages import Report, ResyncDue, SetIdleLimit, WaitFlushed
from kvactors.flush_notifier.sinks import Sink, make_sinks, require_sinks
from kvactors.fork import FORKED, SYSTEMS
from kvactors.gpu_swapper.actor import GpuSwapper
from kvactors.gpu_swapper.messages import CopiedWithin, Copy, CopyReply, CopyWithin, DataPlaneStatus
from kvactors.identity import CacheScope
from kvactors.lifecycle import QUIET, STOP, Opening, Shutdown
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import IndexRequest, SetNumBlocks
from kvactors.prefix_index.settings import Clock, IndexSettings, Roots, TierPolicies
from kvactors.prefix_index.tree import BlockIndex
from kvactors.quotas import SaltCounts, salt_id
from kvactors.settings import Config, StorageConfig
from kvactors.storage.actors import StorageReader, StorageWriter
from kvactors.storage.backend import Backend
from kvactors.storage.catalog import keep_quotas
from kvactors.storage.device_store import DeviceStoreActor
from kvactors.storage.factory import object_bytes, object_layout
from kvactors.storage.messages import DeviceStoreMessage, ReaderMessage, StorageReply, WriterMessage


def summarize(system: System) -> dict[str, Any]:
    """The sizes and parts of an open cache. Bytes are those of one rank."""
    config, store = system.config, system.store
    block_bytes, blocks = system.layout.block_bytes, system.device.num_blocks
    slots, backend = system.arena.num_slots, system.backend
    found = None if store is None else store.statistics()
    return {
        "model": config.cache.model,
        "namespace": config.cache.namespace,
        "block_size": config.cache.block_size,
        "block_bytes": block_bytes,
        "device_blocks": blocks,
        "device_bytes": blocks * block_bytes,
        "host_slots": slots,
        "host_bytes": slots * block_bytes,
        "store": system.storage.backend if backend is None else type(backend).__name__,
        "store_objects": 0 if found is None else found.objects,
        "store_bytes": 0 if found is None else found.objects * found.object_bytes,
        "store_capacity_bytes": 0 if found is None else found.capacity * found.object_bytes,
        "sinks": tuple(system.sinks),
        "ranks": config.ranks.count,
    }


Record = TypeVar("Record", bound=NamedTuple)


class ReplacedCounters:
    """Sums of the counters of replaced incarnations, each of which counts from zero."""

    def __init__(self, salts: SaltCounts | None = None) -> None:
        self._salts = salts
        self._sums: defaultdict[tuple[type[Any], str], Counter[str]] = defaultdict(Counter)

    def replaced(self, actor: Actor) -> None:
        self._add(actor.ref.name, actor.statistics())
        if isinstance(actor, PrefixIndex):
            self._add("", actor.index_statistics())
            actor.index.policy.keep_counts(actor.index.tree)
        elif isinstance(actor, CpuEvictor):
            self._add("", actor.host_statistics())
            if self._salts is not None:
                self._salts.host_ended(actor.host.shares.evicted)
        elif isinstance(actor, GpuSwapper):
            self._add("", actor.swapper_statistics())
        elif isinstance(actor, FlushNotifier):
            for sink in actor.sinks.statistics():
                self._add(sink.name, sink)

    def over_incarnations(self, present: Record, name: str = "") -> Record:
        """The statistics of a present incarnation with the counters of the earlier ones added."""
        sums = self._sums[type(present), name]
        return present._replace(**{field: getattr(present, field) + sums[field] for field in sums})

    def of_sinks(
        self, present: Iterable[SinkStatistics], names: Iterable[str]
    ) -> tuple[SinkStatistics, ...]:
        """The statistics of every sink, up to now or up to the switching off of the notifier."""
        found = {sink.name: sink for sink in present}
        return tuple(
            self.over_incarnations(found.get(name) or silent_sink(name), name) for name in names
        )

    def _add(self, name: str, record: Any) -> None:
        sums = self._sums[type(record), name]
        for field in counters_of(type(record)):
            sums[field] += getattr(record, field)


def silent_sink(name: str) -> SinkStatistics:
    """Statistics of a sink that has not been called."""
    return SinkStatistics(name, 0, 0, 0, 0, 0, 0, 0, 0.0, False, 0, 0.0, "", 0)


log = get_logger()

FORGOTTEN_BLOCKS = 1024
"""Blocks that PrefixIndex and FlushNotifier each track beyond the capacity of the tiers."""

SPARE_BYTES = 4 << 20
"""Bytes that PrefixIndex prepares at most for the tokens of such blocks, 4 bytes a token."""


class System:
    """The parts of one cache. Nothing runs before `running()`.

    Args:
        inline_copies: whether to copy in the loop's thread. Loops of virtual time need it, because
            they have no threads.
        clock: of the ages of blocks, the loop's if None.
        item_tokens: tokens of a block in the index of a group (`kvactors.groups`), 0 for any other
            cache.
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
        item_tokens: int = 0,
    ) -> None:
        self.layout = layout_for(config, device)
        self.is_group, self.block_size = item_tokens > 0, item_tokens or config.cache.block_size
        config = config_for(config, device)
        flush_only = config.flush.flush_only
        self.storage = config.storage
        if flush_only:
            self.storage = StorageConfig(backend="none", write_policy="none")
        given = None if flush_only else backend
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
                config,
                self.storage,
                self.layout,
                device,
                backend,
                inline=inline_copies,
                block_size=self.block_size,
            )
        self.ranks = self.plane.group if isinstance(self.plane, RanksPlane) else None
        self.arena: Any = self.plane.slots
        self.backend, self.store = self.plane.backend, self.plane.store
        self.device_store = self.plane.device_store
        shares = None if self.store is None else self.store.shares
        if not flush_only:  # no setting of the store has an effect then
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
        self.totals = ReplacedCounters(quotas.counts)
        self.supervisor.on_replaced = self.totals.replaced
        self.shutdown = Shutdown(config.actors.drain_timeout_s, self.arena)
        self.forked = False
        self.is_open = True  # new calls are accepted
        self.layer_groups: dict[str, System] = {}  # by name
        self.leaked_leases = 0  # garbage-collected before their end
        self.sizing: asyncio.Task[None] | None = None  # `set_num_blocks` at work
        self.asleep = 0  # the level of the sleep
        self.opened_at = 0.0  # Unix time
        self.last_status = "ok"  # the last logged health status
        # loop time at which each condition (component and reason) of the last `health` call began
        self.troubles: dict[tuple[str, str], float] = {}
        # Requests read it twice: not through a look-up of the running loop.
        self.clock = clock_of(asyncio.get_running_loop()) if clock is None else clock
        self._of_the_past = clock is not None
        self.index_asleep = False  # an index that is made now admits no request
        self.epoch = time.time_ns() // 1_000_000
        model, namespace = config.cache.model, config.cache.namespace
        fingerprint = object_layout(config.storage, self.layout, config.ranks.count).fingerprint
        self.roots = Roots(model, namespace, fingerprint)
        self.token_root = CacheScope(model, namespace).root(fingerprint)
        pool = self.storage if self.backend is not None else None

        def ref(kind: type[Actor], name: str | None = None) -> ActorRef:
            return self.supervisor.make_ref(kind, config.actors.channel_bound, name=name)

        self.index: ActorRef[HostReply | CopiedWithin | DataPlaneStatus | IndexRequest] = ref(
            PrefixIndex
        )
        self.swapper: ActorRef[Copy | CopyWithin] = ref(GpuSwapper)
        self.evictor: ActorRef[HostRequest | CopyReply | StorageReply | EmptyHost] = ref(CpuEvictor)
        self.readers: list[ActorRef[ReaderMessage]] = [
            ref(StorageReader, f"storage_reader-{i}") for i in range(pool.readers if pool else 0)
        ]
        self.writers: list[ActorRef[WriterMessage]] = [
            ref(StorageWriter, f"storage_writer-{i}") for i in range(pool.writers if pool else 0)
        ]
        self.device_stores: list[ActorRef[DeviceStoreMessage]] = (
            [] if self.device_store is None else [ref(DeviceStoreActor)]
        )
        self.notifier: ActorRef[Report | SetIdleLimit | ResyncDue] = ref(FlushNotifier)

    @property
    def device(self) -> Any:
        return self.plane.device

    @property
    def sized(self) -> bool:
        return self.plane.device.num_blocks > 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[System]:
        """Open the store and the sinks, touch the arena and run the actors until the block ends.

        At the end of the block the system drains, delivers pending events to the sinks, stops the
        actors in reverse and closes every part. If a part does not open, the parts opened before it
        are closed and the error is raised.

        All steps run in a separate task, so that no cancellation of the caller interrupts one. The
        cancellation is raised when the system has ended.
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
            log.error("the end of the cache failed", error=described(error))

    async def _run(self, started: asyncio.Future[None], leave: asyncio.Future[bool]) -> None:
        shutdown = self.shutdown
        async with self.plane.opened(
            Opening(self.config.actors.open_timeout_s, shutdown)
        ) as opened:
            await self._open_sinks(opened)
            opened.push_async_callback(shutdown.step, "device", self._end_sizing)
            drain, unused = self.config.actors.drain_timeout_s, self.unused()
            async with self.supervisor.running(*self.groups(), drain=drain, outside=unused):
                self.opened_at = time.time()
                log.info("cache opened", **summarize(self))
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
            opens = partial(open_sink, sink)
            await step(f"sink {sink.name!r}", opens, SinkError, sink.ready_timeout)

    async def _drain(self, clean: bool) -> None:
        """Wait until nothing is in flight. clean: whether the block ended without an error. Then
        this also waits until the sinks that respond have received the pending events."""
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
        if self.forked:
            raise CacheClosed(FORKED)
        if self.supervisor.failed is not None:
            raise CacheFailed(self.supervisor.failed_actor, self.supervisor.failed)

    def close_in_child(self) -> None:
        """Refuse every call in a forked child, which lacks the system's threads and loop."""
        self.forked = self.shutdown.forked = self.shutdown.waits.over = True
        self.supervisor.end_by = 0.0
        for ref in self.refs():
            ref.channel.refuse(lambda: CacheClosed(FORKED))

    def refs(self) -> tuple[ActorRef, ...]:
        storage: tuple[ActorRef, ...] = (*self.readers, *self.writers, *self.device_stores)
        return (self.index, self.swapper, self.evictor, *storage, self.notifier)

    def unused(self) -> tuple[type[Actor], ...]:
        """The actors of the channel graph that this cache does not run."""
        unused = [] if self.backend is not None else [StorageReader, StorageWriter]
        return (*unused, *([] if self.device_stores else [DeviceStoreActor]))

    @property
    def idle_limit(self) -> int:
        """Blocks in no tier that the notifier's ledger keeps."""
        return self.plane.device.num_blocks + self.plane.slots.num_slots + FORGOTTEN_BLOCKS

    def blocks_set(self) -> None:
        """The plane has its number of device blocks. A restarting actor is made with it."""
        blocks = self.plane.device.num_blocks
        self.index.try_tell(SetNumBlocks(blocks, *self.config.device.free_blocks(blocks)))
        self.notifier.try_tell(SetIdleLimit(self.idle_limit))

    # -- the factories, in flow order

    def _make_index(self, ref: ActorRef) -> PrefixIndex:
        config, host, storage = self.config, self.config.host, self.storage
        stored = self.plane.backend is not None or self.device_store is not None
        host_tier = host.slots > 0 or (stored and storage.saves == "write_back")
        exclusive = host.mode == "exclusive" or not host.slots
        blocks, block_size = self.plane.device.num_blocks, self.block_size
        index = BlockIndex(
            block_size,
            blocks,
            blocks + host.slots + min(FORGOTTEN_BLOCKS, SPARE_BYTES // (4 * block_size)),
            recompute_last_token=config.cache.recompute_last_token,
            memory_generation=self.plane.generation,
            policy=TierPolicies(
                config.device.policy,
                host.policy_below(config.device) if host.slots else "lru",
                self.clock,
                self.quotas,
            ),
            hashes=bool(self.sinks) or host_tier or stored,
        )
        free_low, free_high = config.device.free_blocks(blocks)
        prefill = config.cache.prefill_tokens_per_s
        if prefill is None and self._of_the_past:
            prefill = 0.0  # nothing computes them
        # With groups a hit needs the items of each, so no group refuses a fetch alone.
        by_cost = storage.fetch and self.plane.backend is not None and not config.cache.groups
        settings = IndexSettings(
            exclusive=exclusive,
            host_tier=host_tier,
            fetch=stored and storage.fetch,
            announce=bool(self.sinks),
            announce_whole=any(sink.announces_full for sink in self.sinks.values()),
            free_low=free_low,
            free_high=free_high,
            save=storage.saves if stored else "none",
            min_hits=storage.min_hits,
            token_root=self.token_root if self.device_store is not None else None,
            host_blocks=host.kept_blocks,
            keep_lineages=self.plane.store is not None and self.plane.store.keeps_lineages,
            asleep=self.index_asleep,
            pin_share=config.hints.pin_share,
            prefill_tokens_per_s=prefill if by_cost else 0.0,
        )
        return PrefixIndex(
            ref,
            index=index,
            evictor=self.evictor,
            swapper=self.swapper,
            notifier=self.notifier,
            roots=self.roots,
            settings=settings,
        )

    def _make_evictor(self, ref: ActorRef) -> CpuEvictor:
        config = self.config
        return CpuEvictor(
            ref,
            config=config.host,
            storage=self.storage,
            arena=self.plane.slots,
            peers=Peers(
                self.index,
                self.swapper,
                self.readers,
                self.writers,
                self.notifier,
                next(iter(self.device_stores), None),
            ),
            layerwise=config.device.layerwise,
            memory_generation=self.plane.generation,
            shares=HostShares(
                self.quotas.default.host,
                {salt_id(salt): quota.host for salt, quota in self.quotas},
                int(config.hints.pin_share * config.host.slots),
                self.clock,
            ),
            flat=self.is_group,
        )

    def _make_notifier(self, ref: ActorRef) -> FlushNotifier:
        return FlushNotifier(
            ref,
            block_size=self.block_size,
            sinks=list(self.sinks.values()),
            config=self.config.flush,
            epoch=self.epoch,
            idle_limit=self.idle_limit,
            token_root=self.token_root,
            root_of=self.roots.of,
            namespace=self.roots.namespace,
        )

    def groups(self) -> tuple[Group, Group]:
        """The groups of actors that restart together.

        Slots and device blocks are shared memory. An actor that may still write to them restarts
        with the actor that hands them out, so that no copy of an earlier incarnation writes to a
        later one's blocks. An optional actor has a substitute.
        """
        plane, evictor, store = self.plane, self.evictor, self.store
        roots = self.roots.root if self.sinks else None
        reading = {"backend": store, "plane": plane, "evictor": evictor, "notifier": self.notifier}
        direct = {"backend": self.device_store, "plane": plane, "evictor": evictor}
        no_notifier = partial(NoNotifier, block_size=self.block_size, config=self.config.flush)
        swapper = partial(GpuSwapper, plane=plane, evictor=evictor, index=self.index)
        movers = Group(
            "data plane",
            (
                ActorSpec(GpuSwapper, swapper, self.swapper),
                ActorSpec(CpuEvictor, self._make_evictor, evictor),
                *_optional(self.readers, StorageReader, reading),
                *_optional(self.writers, StorageWriter, reading | {"root_of": roots}),
                *_optional(self.device_stores, DeviceStoreActor, direct),
            ),
        )
        core = Group("core", (ActorSpec(PrefixIndex, self._make_index, self.index), movers))
        notifier = Group(
            "notifier", (ActorSpec(FlushNotifier, self._make_notifier, self.notifier, no_notifier),)
        )
        return core, notifier

    # -- the current incarnations, for inspection

    @property
    def index_actor(self) -> PrefixIndex:
        return self.supervisor.actor(self.index.name)  # type: ignore[return-value]

    @property
    def evictor_actor(self) -> CpuEvictor:
        return self.supervisor.actor(self.evictor.name)  # type: ignore[return-value]

    @property
    def swapper_actor(self) -> GpuSwapper:
        return self.supervisor.actor(self.swapper.name)  # type: ignore[return-value]

    @property
    def notifier_actor(self) -> FlushNotifier:
        return self.supervisor.actor(self.notifier.name)  # type: ignore[return-value]


def _optional(refs: Sequence[ActorRef], kind: type[Actor], parts: Mapping[str, Any]) -> list[Group]:
    """A group for each actor that refuses all work while it is switched off."""
    make = partial(kind, **parts)
    return [Group(ref.name, (ActorSpec(kind, make, ref, make),)) for ref in refs]
