"""The data plane of the leader of tensor-parallel ranks: every rank carries out its share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from kvactors.attention_sdk import store_identity
from kvactors.data_plane.base import DataPlane, Direction, Progress, StatusChanged
from kvactors.data_plane.ranks.leader import RankGroup
from kvactors.data_plane.ranks.protocol import CopyBlocks, RankCopyWithin
from kvactors.data_plane.ranks.state import RankState, RankStatistics
from kvactors.data_plane.ranks.store import RanksDeviceStore, RankStore
from kvactors.device.arena import HostSlots
from kvactors.device.base import DeviceBlocks
from kvactors.errors import ConfigError
from kvactors.layout.base import Layout
from kvactors.lifecycle import Opening
from kvactors.settings import Config, StorageConfig
from kvactors.storage.backend import Backend
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.factory import has_device_store


class RanksPlane(DataPlane):
    """A pair has arrived if it has on every rank. The memory of all ranks is lost when a connection
    to one of them is."""

    def __init__(
        self,
        group: RankGroup,
        device: DeviceBlocks,
        slots: HostSlots,
        backend: Backend | None = None,
        device_store: DeviceStore | None = None,
        *,
        store_timeout: float,
    ) -> None:
        super().__init__(device, slots, backend, device_store, store_timeout=store_timeout)
        self.group = group
        self._unacknowledged = False

    @property
    def generation(self) -> int:
        return self.group.memory_generation

    def on_status(self, changed: StatusChanged) -> None:

        def note(_rank: int, health: RankState) -> None:
            lost = health is RankState.DISCONNECTED
            self._unacknowledged |= lost
            changed(self.group.healthy, lost, self.generation)

        self.group.changed, self.group.used = note, self.device.num_blocks > 0
        if self._unacknowledged or not self.group.healthy:
            changed(self.group.healthy, self._unacknowledged, self.generation)

    def acknowledge_loss(self) -> None:
        self._unacknowledged = False

    def abandon_pending(self) -> None:
        self.group.abandon_pending()

    def statistics(self) -> tuple[RankStatistics, ...]:
        return self.group.statistics()

    async def copy_pairs(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        pairs, to_device = (tuple(blocks), tuple(slots)), direction is Direction.TO_DEVICE

        def build(op: int) -> CopyBlocks | RankCopyWithin:
            if direction is Direction.WITHIN:
                return RankCopyWithin(op, *pairs)
            return CopyBlocks(op, to_device, *pairs, progress is not None)

        answers = await self.group.scatter(build, progress, outcomes=len(blocks))
        failed = set()
        for answer in answers:
            if answer is None:
                return tuple(range(len(blocks)))
            failed |= {j for j, outcome in enumerate(answer.outcomes) if outcome}
        return tuple(sorted(failed))

    async def _open(self, stack: AsyncExitStack, opening: Opening) -> None:
        stack.push_async_callback(opening.shutdown.step, "ranks", self.group.close)
        if self.device.num_blocks:
            await self.group.open()
        await self._open_stores(stack, opening)

    async def set_num_blocks(self, num_blocks: int) -> None:
        """Listen for ranks with so many device blocks, and wait until all have joined. RankError if
        they do not in time: nothing was changed."""
        self.group.blocks = num_blocks
        await self.group.open()
        self.group.used = True
        self.device = DeviceBlocks("ranks", self.device.layout, num_blocks)


def make_ranks_plane(config: Config, storage: StorageConfig, layout: Layout) -> RanksPlane:
    """Make the data plane of a leader."""
    token_addressed = has_device_store(config)
    if token_addressed and not config.device.num_blocks:
        raise ConfigError(
            "device.num_blocks is 0, and attention_store registers the device memory when the "
            "cache is opened: set the number of blocks"
        )
    stored = storage.backend != "none" and not token_addressed
    num_slots = config.host.arena_slots(stored=stored)
    group = RankGroup(
        config.ranks,
        store_identity(config, storage, layout, 0, config.ranks.count),
        config.device.num_blocks,
        num_slots,
        storage=storage.backend,
        layers=layout.num_layers + layout.extra_layers,
    )
    backend = None
    if stored:
        backend = RankStore(
            group,
            layout.block_bytes,
            storage.timeout_s,
            exclusive=storage.exclusive,
            shared=storage.backend == "mooncake",
            keeps_lineages=storage.backend == "file" and storage.keep_tokens,
        )
    return RanksPlane(
        group,
        DeviceBlocks("ranks", layout, config.device.num_blocks),
        HostSlots(num_slots, layout.block_bytes),
        backend,
        RanksDeviceStore(group, layout.block_bytes) if token_addressed else None,
        store_timeout=config.storage.timeout_s,
    )
