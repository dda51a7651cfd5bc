"""Copies that the ranks' own processes carry out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvactors.data_plane.base import Direction, Progress
from kvactors.data_plane.engine import Executor
from kvactors.data_plane.ranks.leader import RankGroup
from kvactors.data_plane.ranks.protocol import CopyBlocks
from kvactors.data_plane.ranks.state import Health, RankStatistics
from kvactors.device.arena import Arena
from kvactors.device.base import Device


class RemoteExecutor(Executor):
    """A pair has arrived if it has on every rank."""

    def __init__(self, device: Device, arena: Arena, group: RankGroup) -> None:
        super().__init__(device, arena, threads=0)
        self.group = group
        self._untold = False

    @property
    def era(self) -> int:
        """See `Executor`."""
        return self.group.era

    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        """See `Executor`."""
        pairs, to_device = (tuple(blocks), tuple(slots)), direction is Direction.TO_DEVICE
        answers = await self.group.scatter(
            lambda op: CopyBlocks(op, to_device, *pairs, progress is not None),
            progress,
            outcomes=len(blocks),
        )
        failed = set()
        for answer in answers:
            if answer is None:
                return tuple(range(len(blocks)))
            failed |= {j for j, outcome in enumerate(answer.outcomes) if outcome}
        return tuple(sorted(failed))

    def watch(self, changed: Callable[[bool, bool], None]) -> None:
        """See `Executor`."""

        def note(_rank: int, health: Health) -> None:
            lost = health is Health.AWAY
            self._untold |= lost
            changed(self.group.healthy, lost)

        self.group.changed, self.group.used = note, True
        if self._untold or not self.group.healthy:
            changed(self.group.healthy, self._untold)

    def heard(self) -> None:
        """See `Executor`."""
        self._untold = False

    def release(self) -> None:
        """See `Executor`."""
        self.group.release()

    def statistics(self) -> tuple[RankStatistics, ...]:
        """One record a rank."""
        return self.group.statistics()
