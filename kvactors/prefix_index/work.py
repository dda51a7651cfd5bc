"""Effects of the turns of PrefixIndex, and work that takes several turns."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeAlias

import msgspec

from kvactors.actor import ActorRef, Context, Control, Later, Timer
from kvactors.actor.clock import now
from kvactors.actor.context import Effects
from kvactors.cpu_evictor.messages import HostRequest
from kvactors.flush_notifier.messages import Report
from kvactors.gpu_swapper.messages import CopyWithin
from kvactors.native import Path

TURN_BLOCKS = 2048
"""Blocks that a turn handles at most: each takes up to a few tenths of a microsecond."""

TURN_TOKENS = 131_072
"""Tokens that a turn handles at most: hashing one takes some nanoseconds."""

Work: TypeAlias = Generator[None, None, None]
"""Work in slices of one turn each: yields after each slice but the last."""


class NextSlice(Later, frozen=True, eq=False):
    """To itself: the next slice of some work."""

    work: Work


class Timed(msgspec.Struct, eq=False, kw_only=True):
    """An operation with a deadline."""

    timer: Timer | None = None

    def stop_timer(self) -> None:
        """The operation has ended: its timer must not fire."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class IndexEffects(Effects):
    """Effects by receiver."""

    __slots__ = ("_evictor", "_notifier", "_swapper", "works")

    def __init__(
        self,
        context: Context,
        evictor: ActorRef[HostRequest],
        swapper: ActorRef[CopyWithin],
        notifier: ActorRef[Report],
    ) -> None:
        super().__init__(context)
        self.works = 0  # that have slices left
        self._evictor, self._swapper, self._notifier = evictor, swapper, notifier

    def to_evictor(self, message: HostRequest) -> None:
        self.send(self._evictor, message)

    def to_notifier(self, message: Report) -> None:
        self.send(self._notifier, message)

    def to_swapper(self, message: CopyWithin) -> None:
        self.send(self._swapper, message)

    def at(
        self, operation: Timed, deadline: float, message: Control, *, grace: float = 0.0
    ) -> None:
        """Send the index itself `message` at `deadline`, now if that has passed, `grace` seconds
        later, unless the operation has ended by then."""
        operation.timer = self.after(max(0.0, deadline - now()) + grace, message)

    def begin(self, work: Work) -> None:
        """Do the next slice of some work. If others are left they follow in later turns."""
        for _ in work:
            self.works += 1
            self.to_self(NextSlice(work))
            return


def turn_blocks_of(block_size: int) -> int:
    """Blocks that one turn handles at most, at least one."""
    return max(1, min(TURN_BLOCKS, TURN_TOKENS // block_size))


def slices(start: int, stop: int, blocks: int) -> Iterator[tuple[int, int]]:
    """The range [start, stop) as ranges of at most `blocks`, in ascending order."""
    while start < stop:
        end = min(start + blocks, stop)
        yield start, end
        start = end


def hash_first(path: Path, blocks: int, then: Callable[[], None]) -> Work:
    """Do something that needs all block hashes of a path. Those of a long path are made before,
    `blocks` a turn."""
    while path.num_full_blocks - path.num_hashed > blocks:  # both may change between the turns
        path.hashes(path.num_hashed, path.num_hashed + blocks)
        yield
    then()
