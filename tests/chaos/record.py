"""The settings of a situation, and its findings."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import anyio
import msgspec

MAX_WORDS = 20
"""How many notes and violations are kept."""


LOOK = 0.01
"""Seconds between two checks of a condition."""


async def reached(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, for at most `seconds`. Returns whether it does."""
    with anyio.move_on_after(seconds):
        while not condition():
            await anyio.sleep(LOOK)
    return condition()


class Tally(msgspec.Struct):
    """The counts of a round. storage: blocks that came from the store. errors: the violations.
    figures: of the situation, by their names. available: False if this machine cannot run it
    (`notes` has the reason)."""

    faults: int = 0
    finished: int = 0
    storage: int = 0
    verified_blocks: int = 0
    corrupt_blocks_served: int = 0
    errors: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    figures: dict[str, int] = msgspec.field(default_factory=dict)
    available: bool = True

    def complain(self, what: str) -> None:
        """Add the violation of an invariant."""
        if what not in self.errors and len(self.errors) < MAX_WORDS:
            self.errors.append(what)

    def note(self, what: str) -> None:
        """Add a remark for the reader of the report."""
        if what not in self.notes and len(self.notes) < MAX_WORDS:
            self.notes.append(what)

    def count(self, what: str, number: int) -> None:
        """Add to a figure of the situation's own."""
        self.figures[what] = self.figures.get(what, 0) + number

    def unavailable(self, why: str) -> None:
        """The situation cannot be run on this machine."""
        self.available = False
        self.note(f"not available: {why}")

    def add(self, other: Tally) -> Self:
        """Add the counts of another process or another round."""
        for name in self.__struct_fields__:
            mine = getattr(self, name)
            if type(mine) is int:
                setattr(self, name, mine + getattr(other, name))
        for name, number in other.figures.items():
            self.count(name, number)
        for what in other.errors:
            self.complain(what)
        for what in other.notes:
            self.note(what)
        self.available = self.available and other.available
        return self


class Setting(NamedTuple):
    """A round's place and fortune. folder: empty, its own. rng: of when and what. small: a short
    round."""

    folder: Path
    rng: random.Random
    seed: int
    small: bool

    def seconds(self, low: float, high: float) -> float:
        """A random time, up to `high` seconds (a third of it in a small round)."""
        return self.rng.uniform(low, max(low, high / 3 if self.small else high))

    async def moment(self, low: float, high: float) -> None:
        """Let such a time pass."""
        await anyio.sleep(self.seconds(low, high))

    def times(self, small: int, large: int) -> int:
        """How often to do something: at least `small` times, at most `large`. `small` in a small
        round."""
        return small if self.small else self.rng.randint(small, large)
