"""CpuEvictor, the part that speaks to a store which moves device memory itself: no host slots take
part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from kvactors.actor import ActorRef, PeerRestarted, on
from kvactors.actor.clock import now
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.reports import count_of
from kvactors.cpu_evictor.traffic import Traffic
from kvactors.storage.messages import FetchDevice, Fetched, Saved, SaveDevice


class Fetching(NamedTuple):
    """A load's blocks on their way. first: position of the first of them among those the load
    wants."""

    job: LoadJob
    first: int


class Saving(NamedTuple):
    """Device blocks that are being written. then: what to do with the number of those that are
    stored."""

    blocks: int
    then: Callable[[int], None]


class Direct(Traffic):
    """direct: the actor of such a store, None without one."""

    def __init__(self, ref: ActorRef, *, direct: ActorRef | None, **rest: Any) -> None:
        super().__init__(ref, **rest)
        self.direct = direct
        self.fetching: dict[int, Fetching] = {}
        self.saving: dict[int, Saving] = {}

    @abstractmethod
    def load_moved(self, job: LoadJob) -> None:
        """More of a load has arrived, or will not: see whether it is over."""

    def fetch_direct(self, job: LoadJob) -> None:
        """Read what the host lacks straight into the load's blocks, as soon as it has some. Nobody
        gives up on that before the store says that it writes no more: the blocks are the index's to
        hand out again."""
        if self.direct is None or job.blocks is None or not job.fetching:
            return
        first, op = len(job.entries), next(self._ops)
        self.fetching[op] = Fetching(job, first)
        self.tell(
            self.direct,
            FetchDevice(
                op, job.tokens, job.start + first, job.blocks[first:], job.deadline, self.era
            ),
        )

    @on(Fetched)
    def fetched_direct(self, message: Fetched) -> None:
        """The store writes no more into those blocks."""
        fetching = self.fetching.pop(message.op, None)
        if fetching is None:
            return
        job, first = fetching
        good = count_of(message.good, len(job.wanted) - first)
        job.fetching = False
        job.arrived.update(range(first, first + good))
        self.fetched += good
        self.load_moved(job)

    def save_direct(
        self, tokens: bytes, start: int, blocks: tuple[int, ...], then: Callable[[int], None]
    ) -> None:
        """Write device blocks; `then` gets how many are stored, when none is read any more."""
        if self.direct is None:
            raise RuntimeError("there is no store that moves device memory")
        op = next(self._ops)
        self.saving[op] = Saving(len(blocks), then)
        self.tell(
            self.direct,
            SaveDevice(op, tokens, start, blocks, now() + self.storage.timeout, self.era),
        )

    @on(Saved)
    def saved_direct(self, message: Saved) -> None:
        """The store reads no more from those blocks."""
        saving = self.saving.pop(message.op, None)
        if saving is not None:
            good = count_of(message.good, saving.blocks)
            self.written += good
            self.write_failures += saving.blocks - good
            saving.then(good)

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """What a dead one was asked will not be answered, and nothing of it runs any more."""
        if self.direct is not None and message.name == self.direct.name:
            for op in list(self.fetching):
                self.fetched_direct(Fetched(op, 0))
            for op in list(self.saving):
                self.saved_direct(Saved(op, 0))
        super().peer_restarted(message)
