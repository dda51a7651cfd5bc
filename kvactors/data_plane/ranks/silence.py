"""Detection of silent ranks: a copy is not answered in time, or neither a store operation nor a
ping is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvactors.data_plane.ranks.link import Link
from kvactors.data_plane.ranks.state import Rank, RankState


class Silence:
    """timeout: seconds that an answer may take. report: called with a rank, its new health and the
    reason. closing: whether the leader reuses no slot and no block any more."""

    def __init__(self, timeout: float, report: Callable[[Rank, RankState, str], None]) -> None:
        self.closing = False
        self._timeout = timeout
        self._report = report
        self._pings: set[asyncio.Task[None]] = set()

    def late(self, rank: Rank, op: int) -> None:
        """An answer is late. A rank whose store is slow answers a ping, one that is stopped does
        not."""
        operation = rank.open.get(op)
        if self.closing or operation is None or not operation.stored or rank.link is None:
            self._silent(rank, op)
            return
        task = asyncio.get_running_loop().create_task(self._ping(rank, op, rank.link))
        self._pings.add(task)
        task.add_done_callback(self._pings.discard)

    async def _ping(self, rank: Rank, op: int, link: Link) -> None:
        answered = await link.answers(self._timeout)
        if op not in rank.open:
            return
        if answered and not self.closing:
            self._watch(rank, op)
        else:
            self._silent(rank, op)

    def _watch(self, rank: Rank, op: int) -> None:
        rank.open[op].timer = asyncio.get_running_loop().call_later(
            self._timeout, self.late, rank, op
        )

    def _silent(self, rank: Rank, op: int) -> None:
        if self.closing:
            rank.settle()
        elif op in rank.open:
            rank.overdue.add(op)
            if rank.health is RankState.HEALTHY:
                rank.silences += 1
                self._report(rank, RankState.SILENT, f"no answer in {self._timeout:g} s")

    def answered(self, rank: Rank) -> None:
        """A rank has answered a ping. If its store alone is late, copies can go on."""
        if rank.health is RankState.SILENT and all(rank.open[op].stored for op in rank.overdue):
            for op in rank.overdue:
                self._watch(rank, op)
            rank.overdue.clear()
            self._report(rank, RankState.HEALTHY, "")
