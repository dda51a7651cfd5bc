"""Blocks of the ledger's tree, and how differences along a path become one run, which becomes one task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple, TypeVar

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import FlushTask, Origin
from kvactors.units import ALL_TIERS, Reason, Residency, Tier

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work in steps, between which others may run, and its result."""

LONGEST = 32_768
"""Blocks in one task at most: a longer run is sent in parts."""

PATHS = 4
"""A batch of n blocks may carry paths of PATHS x n blocks in all: many short runs deep in the tree are told in several batches."""

BITS = tuple([int(tier) for tier in Tier if tier & tiers] for tiers in range(ALL_TIERS + 1))
"""By set of tiers: its members as numbers (plain ints: arithmetic on flags is slow)."""

LAST = 0
"""Index of `Entry.reasons` for the last change on any tier; a tier's own bit is the index for its own last change."""


def finish(steps: Steps[T] | Iterator[None]) -> T:
    """All steps at once, and their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Entry:
    """One block.

    truth: set of tiers that hold it. states: per sink what it believes, a set of tiers, and above it (shifted by UNSURE) the tiers on
    which its answer got lost, so that it may believe either. held: deliveries under way that are about it. finished: covered by
    the path of a finished request. reasons: of the last change, by LAST or by tier. by_tokens: tokens alone identify it, in the scope that
    the cache was opened with.
    """

    __slots__ = (
        "after",
        "before",
        "by_tokens",
        "children",
        "depth",
        "finished",
        "held",
        "key",
        "number",
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
        self.number = 0  # see `Order`
        self.before: Entry | None = None
        self.after: Entry | None = None
        self.finished = self.by_tokens = False
        self.reasons = [Reason.COMMIT] * (1 + max(Tier))

    def idle(self) -> bool:
        """Whether nothing speaks of it, no tier, no sink and no delivery, except perhaps blocks below it."""
        return not (self.truth or self.held or any(self.states))


KEY: Callable[[Entry], bytes] = attrgetter("key")
TOKENS: Callable[[Entry], bytes] = attrgetter("tokens")


class Run(NamedTuple):
    """Blocks in path order, each the parent of the next, that change alike for a sink. bit: the tier, as a number."""

    entries: list[Entry]
    bit: int
    resident: bool
    reason: Reason

    def __repr__(self) -> str:
        return discreet(self)


class Batch(NamedTuple):
    """One delivery: what the sink is sent, and the runs behind the tasks, one for one; or that everything is gone: all entries numbered up to
    `cleared`, if that is not 0."""

    tasks: list[FlushTask]
    runs: list[Run]
    cleared: int = 0

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


def pick(dirty: Mapping[Entry, int], limit: int, step: int) -> Steps[dict[Entry, None]]:
    """About `limit` of the entries that differ: each with those above it that differ as well, and never the first part of a run only, since
    every part would carry the path from the root again."""
    picked: dict[Entry, None] = {}
    last: Entry | None = None
    looked = 0
    for entry in dirty:
        if len(picked) >= limit and entry.parent is not last:
            break
        chain, above = [entry], entry.parent
        while above is not None and above in dirty and above not in picked:
            chain.append(above)
            above = above.parent
            looked += 1
            if not looked % step:
                yield
        while chain:
            picked[chain.pop()] = None
            looked += 1
            if not looked % step:
                yield
        last = entry
    return picked


def join(entries: Collection[Entry], bit: int, *, resident: bool, reason_index: int, step: int) -> Steps[list[Run]]:
    """Runs of entries, each as long as the parent chain goes on within them with one reason; a branch point splits, and so does LONGEST.
    Linear; yields after each `step` blocks."""
    looked = 0
    members: set[Entry] = set()
    heir: dict[Entry, Entry | None] = {}  # of each member its only child among the members; None if there are several
    for entry in entries:
        members.add(entry)
        looked += 1
        if not looked % step:
            yield
    for entry in entries:
        if entry.parent in members:
            heir[entry.parent] = None if entry.parent in heir else entry
        looked += 1
        if not looked % step:
            yield
    runs: list[Run] = []
    for entry in entries:
        looked += 1
        if not looked % step:
            yield
        reason, parent = entry.reasons[reason_index], entry.parent
        if parent in members and heir[parent] is entry and parent.reasons[reason_index] is reason:
            continue  # its parent's run has it
        run, below = [entry], heir.get(entry)
        while below is not None and below.reasons[reason_index] is reason:
            if len(run) == LONGEST:
                runs.append(Run(run, bit, resident, reason))
                run = []
            run.append(below)
            below = heir.get(below)
            looked += 1
            if not looked % step:
                yield
        runs.append(Run(run, bit, resident, reason))
    return runs


def runs_of(
    losses: Mapping[int, Collection[Entry]], gains: Mapping[int, Collection[Entry]], *, node: bool, paths: int | None, step: int
) -> Steps[list[Run]]:
    """Changes by tier as runs, in the order in which they are sent. node: a sink that takes all tiers as one. paths: of a sink that needs
    paths, the blocks of a batch: the first runs only, whose paths are not much longer."""
    runs: list[Run] = []
    for changes, resident in ((losses, False), (gains, True)):
        for bit, some in changes.items():
            runs += yield from join(some, bit, resident=resident, reason_index=LAST if node else bit, step=step)
    return ordered(runs) if paths is None else list(within(ordered(runs), PATHS * paths))


def as_task(run: Run, epoch: int, *, by_name: bool, step: int) -> Steps[FlushTask]:
    """What a sink is sent of a run. by_name: it needs no path."""
    first, last = run.entries[0], run.entries[-1]
    tokens = b""
    if not by_name:
        tokens = yield from path_steps(last, step)
    elif run.resident:
        tokens = yield from gathered(run.entries, TOKENS, step)
    keys = yield from gathered(run.entries, KEY, step)
    return FlushTask(
        tokens,
        first.depth - 1,
        len(run.entries),
        keys,
        first.parent_key,
        Residency.RESIDENT if run.resident else Residency.GONE,
        Tier(run.bit),
        run.reason,
        epoch,
        first.origin,
    )


def gathered(entries: list[Entry], field: Callable[[Entry], bytes], step: int) -> Steps[bytes]:
    """A field of all entries as one buffer."""
    if len(entries) <= step:
        return b"".join(map(field, entries))
    whole = bytearray()
    for i in range(0, len(entries), step):
        whole += b"".join(map(field, entries[i : i + step]))
        yield
    return bytes(whole)


def clear_task(tiers: int, epoch: int) -> FlushTask:
    """Everything is gone from every tier that a sink hears of."""
    return FlushTask(b"", 0, 0, b"", b"", Residency.GONE, Tier(tiers), Reason.CLEAR, epoch)


def path_tokens(entry: Entry) -> bytes:
    """The complete token path from the root to a block."""
    return finish(path_steps(entry, entry.depth))


def path_steps(entry: Entry, step: int) -> Steps[bytes]:
    """The same in steps."""
    path: list[Entry] = []
    node: Entry | None = entry
    while node is not None:
        path.append(node)
        node = node.parent
        if not len(path) % step:
            yield
    path.reverse()
    return (yield from gathered(path, TOKENS, step))


def ordered(runs: Iterable[Run]) -> list[Run]:
    """Losses first, the deepest first; then gains, the shallowest first, so that parents come before children."""
    return sorted(runs, key=lambda run: (run.resident, run.entries[0].depth if run.resident else -run.entries[-1].depth))


def within(runs: list[Run], blocks: int) -> Iterator[Run]:
    """The first runs (one at least) whose paths have `blocks` blocks in all."""
    for i, run in enumerate(runs):
        blocks -= run.entries[-1].depth
        if i and blocks < 0:
            return
        yield run
