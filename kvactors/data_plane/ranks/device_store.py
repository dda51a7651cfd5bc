"""The stores of ranks that move the ranks' own device memory, as one: a block is there if every
rank has its share of it."""

from __future__ import annotations

from typing import Literal

from kvactors.actor.log import get_logger
from kvactors.data_plane.ranks.leader import RankGroup
from kvactors.data_plane.ranks.moving import FAILED
from kvactors.data_plane.ranks.protocol import MoveDevice
from kvactors.storage.backends.device_store import DeviceStore
from kvactors.storage.messages import Outcome

log = get_logger()


class RanksDeviceStore(DeviceStore):
    """Every move is sent to all ranks. The number of blocks that arrived, or are stored, is the
    smallest of all ranks. A disconnected or silent rank counts as zero."""

    def __init__(self, group: RankGroup, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self.group = group

    async def open(self) -> None:
        """The ranks open their stores themselves."""

    async def fetch(
        self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float
    ) -> int:
        """See `DeviceStore.fetch`."""
        good = await self._all("fetch", tokens, start, blocks, seconds)
        self.reads += good
        return good

    async def save(self, tokens: bytes, start: int, blocks: tuple[int, ...], seconds: float) -> int:
        """See `DeviceStore.save`."""
        good = await self._all("save", tokens, start, blocks, seconds)
        self.writes += good
        return good

    async def _all(
        self,
        kind: Literal["fetch", "save"],
        tokens: bytes,
        start: int,
        blocks: tuple[int, ...],
        seconds: float,
    ) -> int:
        attempts = self.attempts.reads if kind == "fetch" else self.attempts.writes
        if not attempts.allow():
            return self._unavailable(len(blocks))
        answers = await self.group.scatter(
            lambda op: MoveDevice(op, kind, tokens, start, blocks, seconds),
            outcomes=len(blocks),
            worst=FAILED,
        )
        counts = [0 if answer is None else leading(answer.outcomes) for answer in answers]
        failed = [
            rank
            for rank, answer in enumerate(answers)
            if answer is None or FAILED in answer.outcomes
        ]
        good = min(counts, default=0)
        if good:
            attempts.worked()
        elif failed:
            attempts.failed(f"device stores of ranks {failed} failed, or did not answer")
        elif kind == "save":
            attempts.failed("the ranks stored no block", Outcome.NO_SPACE)
        if failed:
            log.warning(
                "device stores of ranks failed",
                call=kind,
                ranks=failed,
                blocks=len(blocks),
                moved=good,
            )
            self.unavailable += len(blocks) - good
        elif kind == "fetch":
            self.misses += len(blocks) - good
        return good

    async def close(self) -> None:
        """The ranks close their stores themselves."""


def leading(outcomes: bytes) -> int:
    """How many blocks, from the first on, were moved."""
    return next((i for i, outcome in enumerate(outcomes) if outcome), len(outcomes))
