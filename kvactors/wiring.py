"""Wiring of one cache: the actors' refs, their factories in flow order and the groups in which
they restart. `system.py` draws the arrows between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from kvactors.actor import Actor, ActorRef, ActorSpec, Group, Supervisor
from kvactors.actor.clock import clock_of
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.messages import EmptyHost, HostReply, HostRequest
from kvactors.cpu_evictor.slots import HostShares
from kvactors.data_plane.local import LocalPlane
from kvactors.data_plane.ranks.plane import RanksPlane
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.messages import Report, SetIdleLimit
from kvactors.flush_notifier.sinks import Sink
from kvactors.gpu_swapper.actor import GpuSwapper
from kvactors.gpu_swapper.messages import (
    CopiedWithin,
    Copy,
    CopyReply,
    CopyWithin,
    DataPlaneStatus,
)
from kvactors.identity import CacheScope
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import IndexRequest, SetNumBlocks
from kvactors.prefix_index.policy import Clock, policies_of
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.settings import IndexSettings
from kvactors.quotas import Quotas, salt_id
from kvactors.settings import Config, StorageConfig
from kvactors.storage.actors import StorageReader, StorageWriter
from kvactors.storage.device_store import DeviceStoreActor
from kvactors.storage.messages import DeviceStoreMessage, ReaderMessage, StorageReply, WriterMessage
from kvactors.substitutes import NoDeviceStore, NoNotifier, NoReader, NoWriter

FORGOTTEN = 1024
"""Blocks that PrefixIndex and FlushNotifier each track beyond the capacity of the tiers."""

SPARE_BYTES = 4 << 20
"""Bytes that PrefixIndex prepares at most for the tokens of such blocks, 4 bytes a token."""


class Wiring:
    """Refs, factories and groups of the actors of one cache.

    Args:
        config: the cache's settings.
        storage: the settings of the store that is really used.
        plane: the data plane.
        sinks: the sinks by name.
        fingerprint: the layout's fingerprint, part of every root hash.
        supervisor: makes the refs.
        clock: of the ages of blocks, the loop's if None.
        quotas: of salts.

    Attributes:
        asleep: whether the cache sleeps: an index that is made then admits no request.
        epoch: of this start of the process, as sinks see it.
    """

    def __init__(
        self,
        config: Config,
        storage: StorageConfig,
        plane: LocalPlane | RanksPlane,
        sinks: Mapping[str, Sink],
        fingerprint: bytes,
        supervisor: Supervisor,
        clock: Clock | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        # Requests read it twice: not through a look-up of the running loop.
        self.clock = clock_of(asyncio.get_running_loop()) if clock is None else clock
        self.asleep = False
        self.quotas = Quotas() if quotas is None else quotas
        self.config, self.storage, self.plane, self.sinks = config, storage, plane, sinks
        self.epoch = time.time_ns() // 1_000_000
        self.roots = Roots(config.cache.model, config.cache.namespace, fingerprint)
        self.token_root = CacheScope(config.cache.model, config.cache.namespace).root(fingerprint)
        bound = config.actors.channel_bound
        pool = storage if plane.backend is not None else None
        ref = supervisor.make_ref
        self.index: ActorRef[HostReply | CopiedWithin | DataPlaneStatus | IndexRequest] = ref(
            PrefixIndex, bound
        )
        self.swapper: ActorRef[Copy | CopyWithin] = ref(GpuSwapper, bound)
        self.evictor: ActorRef[HostRequest | CopyReply | StorageReply | EmptyHost] = ref(
            CpuEvictor, bound
        )
        self.readers: list[ActorRef[ReaderMessage]] = [
            ref(StorageReader, bound, name=f"storage_reader-{i}")
            for i in range(pool.readers if pool else 0)
        ]
        self.device_store: ActorRef[DeviceStoreMessage] | None = None
        if plane.device_store is not None:
            self.device_store = ref(DeviceStoreActor, bound)
        self.writers: list[ActorRef[WriterMessage]] = [
            ref(StorageWriter, bound, name=f"storage_writer-{i}")
            for i in range(pool.writers if pool else 0)
        ]
        self.notifier: ActorRef[Report | SetIdleLimit] = ref(FlushNotifier, bound)

    def refs(self) -> tuple[ActorRef, ...]:
        """The refs of every actor."""
        device_store = () if self.device_store is None else (self.device_store,)
        return (
            self.index,
            self.swapper,
            self.evictor,
            *self.readers,
            *self.writers,
            *device_store,
            self.notifier,
        )

    def unused(self) -> tuple[type[Actor], ...]:
        """The actors of the channel graph that this cache does not run."""
        unused: tuple[type[Actor], ...] = (
            () if self.plane.backend is not None else (StorageReader, StorageWriter)
        )
        return unused if self.device_store is not None else (*unused, DeviceStoreActor)

    @property
    def idle_limit(self) -> int:
        """Blocks in no tier that the notifier's ledger keeps."""
        return self.plane.device.num_blocks + self.plane.slots.num_slots + FORGOTTEN

    def blocks_set(self) -> None:
        """The plane's number of device blocks has been set. An actor that is
        restarting is made with the number."""
        blocks = self.plane.device.num_blocks
        self.index.try_tell(SetNumBlocks(blocks, *self.config.device.free_blocks(blocks)))
        self.notifier.try_tell(SetIdleLimit(self.idle_limit))

    # -- the factories, in flow order

    def _make_index(self, ref: ActorRef) -> PrefixIndex:
        config, host, storage = self.config, self.config.host, self.storage
        stored = self.plane.backend is not None or self.device_store is not None
        host_tier = host.slots > 0 or (stored and storage.saves == "write_back")
        exclusive = host.mode == "exclusive" or not host.slots
        blocks, block_size = self.plane.device.num_blocks, config.cache.block_size
        index = BlockIndex(
            block_size,
            blocks,
            blocks + host.slots + min(FORGOTTEN, SPARE_BYTES // (4 * block_size)),
            recompute_last_token=config.cache.recompute_last_token,
            memory_generation=self.plane.generation,
            policy=policies_of(
                config.device.policy,
                host.policy_below(config.device) if host.slots else "lru",
                self.clock,
                self.quotas,
            ),
            hashes=bool(self.sinks) or host_tier or stored,
        )
        free_low, free_high = config.device.free_blocks(blocks)
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
            asleep=self.asleep,
            pin_share=config.hints.pin_share,
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

    def _make_swapper(self, ref: ActorRef) -> GpuSwapper:
        return GpuSwapper(ref, plane=self.plane, evictor=self.evictor, index=self.index)

    def _make_evictor(self, ref: ActorRef) -> CpuEvictor:
        return CpuEvictor(
            ref,
            config=self.config.host,
            policy=self.config.host.policy_below(self.config.device),
            storage=self.storage,
            arena=self.plane.slots,
            index=self.index,
            swapper=self.swapper,
            readers=self.readers,
            writers=self.writers,
            notifier=self.notifier,
            device_store=self.device_store,
            layerwise=self.config.device.layerwise,
            memory_generation=self.plane.generation,
            shares=self._host_shares(),
        )

    def _host_shares(self) -> HostShares:
        quotas, config = self.quotas, self.config
        return HostShares(
            quotas.default.host,
            {salt_id(salt): quota.host for salt, quota in quotas},
            int(config.hints.pin_share * config.host.slots),
            self.clock,
        )

    def _make_reader(
        self, ref: ActorRef, kind: type[StorageReader | NoReader] = StorageReader
    ) -> StorageReader | NoReader:
        assert self.plane.store is not None
        return kind(
            ref,
            backend=self.plane.store,
            plane=self.plane,
            evictor=self.evictor,
            notifier=self.notifier,
        )

    def _make_writer(
        self, ref: ActorRef, kind: type[StorageWriter | NoWriter] = StorageWriter
    ) -> StorageWriter | NoWriter:
        assert self.plane.store is not None
        root_of = self.roots.root if self.sinks else None
        return kind(
            ref,
            backend=self.plane.store,
            plane=self.plane,
            evictor=self.evictor,
            notifier=self.notifier,
            root_of=root_of,
        )

    def _make_device_store(
        self, ref: ActorRef, kind: type[DeviceStoreActor | NoDeviceStore] = DeviceStoreActor
    ) -> DeviceStoreActor | NoDeviceStore:
        assert self.plane.device_store is not None
        return kind(ref, backend=self.plane.device_store, plane=self.plane, evictor=self.evictor)

    def _make_notifier(self, ref: ActorRef) -> FlushNotifier:
        return FlushNotifier(
            ref,
            block_size=self.config.cache.block_size,
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
        no_reader, no_writer = (
            partial(self._make_reader, kind=NoReader),
            partial(self._make_writer, kind=NoWriter),
        )
        no_device_store = partial(self._make_device_store, kind=NoDeviceStore)
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
        refs = () if self.device_store is None else (self.device_store,)
        device_store = [
            Group(
                ref.name,
                (ActorSpec(DeviceStoreActor, self._make_device_store, ref, no_device_store),),
            )
            for ref in refs
        ]
        plane = Group("data plane", (swapper, evictor, *readers, *writers, *device_store))
        core = Group("core", (ActorSpec(PrefixIndex, self._make_index, self.index), plane))
        notifier = Group(
            "notifier", (ActorSpec(FlushNotifier, self._make_notifier, self.notifier, no_notifier),)
        )
        return core, notifier
