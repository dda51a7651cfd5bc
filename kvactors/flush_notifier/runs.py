"""Blocks of the ledger's tree, and how differences along a path become one run, which becomes one task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import FlushTask, Origin
from kvactors.units import Reason, Residency, Tier

LAST = 0
"""Index of `Entry.reasons` for the last change on any tier; a tier's own bit is the index for its own last change."""


class Entry:
    """One block.

    truth: set of tiers that hold it. states: per sink what it believes, a set of tiers, and above it (shifted by UNSURE) the tiers on
    which its answer got lost, so that it may believe either. held: deliveries under way that are about it. finished: covered by
    the path of a finished request. reasons: of the last change, by LAST or by tier. by_tokens: tokens alone identify it, in the scope that
    the cache was opened with.
    """

    __slots__ = (
        "by_tokens",
        "children",
        "depth",
        "finished",
        "held",
        "key",
        "origin",
        "parent",
        "parent_key",
        "reasons",
        "states",
        "tokens",
        "truth",
    )

    def __init__(self, key: bytes, parent: Entry | None, parent_key: bytes, tokens: bytes, origin: Origin, sinks: int) -> None:
        self.key = key
        self.origin = origin
        self.parent = parent
        self.parent_key = parent_key
        self.tokens = tokens
        self.depth: int = parent.depth + 1 if parent is not None else 1
        self.children = self.truth = self.held = 0
        self.states = [0] * sinks
        self.finished = self.by_tokens = False
        self.reasons = [Reason.COMMIT] * (1 + max(Tier))

    def idle(self) -> bool:
        """Whether nothing speaks of it, no tier, no sink and no delivery, except perhaps blocks below it."""
        return not (self.truth or self.held or any(self.states))


class Run(NamedTuple):
    """Blocks in path order, each the parent of the next, that change alike for a sink. bit: the tier, as a number."""

    entries: list[Entry]
    bit: int
    resident: bool
    reason: Reason

    def __repr__(self) -> str:
        return discreet(self)


class Batch(NamedTuple):
    """One delivery: what the sink is told, and the runs behind the tasks, one for one; or that all of `cleared` (everything known then)
    is gone."""

    tasks: list[FlushTask]
    runs: list[Run]
    cleared: Sequence[Entry] = ()

    def __repr__(self) -> str:
        return discreet(self)

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first `count` tasks, and the others."""
        return Batch(self.tasks[:count], self.runs[:count]), Batch(self.tasks[count:], self.runs[count:], self.cleared)


class Holding(NamedTuple):
    """One block that a sink was told is resident. tokens: its own. tiers: a set."""

    key: bytes
    parent: bytes
    position: int
    tokens: bytes
    tiers: int
    origin: Origin

    def __repr__(self) -> str:
        return discreet(self)


def join(entries: Collection[Entry], bit: int, *, resident: bool, reason_index: int) -> list[Run]:
    """Runs of entries, each as long as the parent chain goes on within them with one reason; a branch point splits. Linear."""
    members = set(entries)
    heir: dict[Entry, Entry | None] = {}  # of each member its only child among the members; None if there are several
    for entry in entries:
        if entry.parent in members:
            heir[entry.parent] = None if entry.parent in heir else entry
    runs: list[Run] = []
    for entry in entries:
        reason, parent = entry.reasons[reason_index], entry.parent
        if parent in members and heir[parent] is entry and parent.reasons[reason_index] is reason:
            continue  # its parent's run has it
        run, below = [entry], heir.get(entry)
        while below is not None and below.reasons[reason_index] is reason:
            run.append(below)
            below = heir.get(below)
        runs.append(Run(run, bit, resident, reason))
    return runs


def as_task(run: Run, epoch: int, *, by_name: bool = False) -> FlushTask:
    """What a sink is told of a run. by_name: it needs no path."""
    first, last = run.entries[0], run.entries[-1]
    tokens = path_tokens(last) if not by_name else b"".join([e.tokens for e in run.entries]) if run.resident else b""
    keys = b"".join([entry.key for entry in run.entries])
    residency = Residency.RESIDENT if run.resident else Residency.GONE
    return FlushTask(
        tokens,
        first.depth - 1,
        len(run.entries),
        keys,
        first.parent_key,
        residency,
        Tier(run.bit),
        run.reason,
        epoch,
        first.origin,
    )


def clear_task(tiers: int, epoch: int) -> FlushTask:
    """Everything is gone from every tier that a sink hears of."""
    return FlushTask(b"", 0, 0, b"", b"", Residency.GONE, Tier(tiers), Reason.CLEAR, epoch)


def path_tokens(entry: Entry) -> bytes:
    """The complete token path from the root to a block."""
    parts: list[bytes] = []
    node: Entry | None = entry
    while node is not None:
        parts.append(node.tokens)
        node = node.parent
    parts.reverse()
    return b"".join(parts)


def ordered(runs: Iterable[Run]) -> list[Run]:
    """Losses first, the deepest first; then gains, the shallowest first, so that parents come before children."""
    return sorted(runs, key=lambda run: (run.resident, run.entries[0].depth if run.resident else -run.entries[-1].depth))
