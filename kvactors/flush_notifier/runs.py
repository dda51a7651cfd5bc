"""Blocks of the ledger's tree, runs of them that change alike, and how a run becomes a task."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple, TypeVar

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import ExtraKeys, FlushTask, Origin
from kvactors.flush_notifier.view import SinkView
from kvactors.types import ALL_TIERS, Reason, Residency, Tier

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work in steps, between which others may run, and its result."""

UNSURE = 3
"""Bits by which `Entry.states` holds the tiers that a sink's view may have or not."""

BITS = tuple([int(tier) for tier in Tier if tier & tiers] for tiers in range(ALL_TIERS + 1))
"""By set of tiers: its members as numbers (plain ints: arithmetic on flags is slow)."""

LAST = 0
"""Index of `Entry.reasons` for the last change on any tier; a tier's own bit is the index for its
own last change."""


def finish(steps: Steps[T] | Iterator[None]) -> T:
    """All steps at once, and their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Entry:
    """One block.

    truth: set of tiers that hold it. dues: per sink the set of tiers on which it is to be
    announced, see `Ledger`. states: per sink its view, a set of tiers, and above it (shifted by
    UNSURE) the tiers on which its answer got lost, so that its view may have them or not. held:
    deliveries in flight that are about it. finished: covered by the path of a finished request.
    reasons: of the last change, by LAST or by tier. by_tokens: tokens alone identify it, in the
    scope that the cache was opened with. child, left, right: the children of a block are a linked
    list.
    """

    __slots__ = (
        "after",
        "before",
        "by_tokens",
        "child",
        "children",
        "depth",
        "dues",
        "extra_key",
        "finished",
        "held",
        "key",
        "left",
        "number",
        "origin",
        "parent",
        "parent_key",
        "reasons",
        "right",
        "states",
        "tokens",
        "truth",
    )

    def __init__(
        self,
        key: bytes,
        parent: Entry | None,
        parent_key: bytes,
        tokens: bytes,
        origin: Origin,
        sinks: int,
        extra_key: bytes = b"",
    ) -> None:
        self.key = key
        self.origin = origin
        self.extra_key = extra_key
        self.parent = parent
        self.parent_key = parent_key
        self.tokens = tokens
        self.depth: int = parent.depth + 1 if parent is not None else 1
        self.children = self.truth = self.held = 0
        self.states = [0] * sinks
        self.dues = [0] * sinks
        self.child: Entry | None = None
        self.left: Entry | None = None
        self.right: Entry | None = None
        self.number = 0  # see `Order`
        self.before: Entry | None = None
        self.after: Entry | None = None
        self.finished = self.by_tokens = False
        self.reasons = [Reason.COMMIT] * (1 + max(Tier))

    def idle(self) -> bool:
        """Whether it is nowhere and in no sink's view and in no delivery; there may be blocks below
        it."""
        return not (self.truth or self.held or any(self.states))

    def send_again(self, sinks: Iterable[int]) -> None:
        """What these sinks have been sent of it counts as unsure: it is sent again."""
        for sink in sinks:
            self.states[sink] |= (self.states[sink] & ALL_TIERS.value) << UNSURE

    def link(self) -> None:
        """Add it to the children of its parent."""
        above = self.parent
        if above is not None:
            above.children += 1
            self.right = above.child
            if above.child is not None:
                above.child.left = self
            above.child = self

    def unlink(self) -> None:
        """Remove it from the children of its parent. It keeps its `right`: a scan that stands at it
        continues there."""
        above, left, right = self.parent, self.left, self.right
        if above is not None:
            above.children -= 1
            if left is not None:
                left.right = right
            else:
                above.child = right
            if right is not None:
                right.left = left
            self.left = None


def counts(entry: Entry, view: SinkView) -> bool:
    """Whether a sink of this view gets a block at all."""
    return (entry.finished or not view.at_finish) and (entry.by_tokens or not view.by_tokens)


KEY: Callable[[Entry], bytes] = attrgetter("key")
TOKENS: Callable[[Entry], bytes] = attrgetter("tokens")


class Run(NamedTuple):
    """Blocks in path order, each the parent of the next, that change alike for a sink. bit: the
    tier, as a number."""

    entries: list[Entry]
    bit: int
    resident: bool
    reason: Reason

    def __repr__(self) -> str:
        return discreet(self)


class Batch(NamedTuple):
    """One delivery: what the sink is sent, and the runs behind the tasks, one for one; or that
    everything is gone: all entries numbered up to `cleared`, if that is not 0."""

    tasks: list[FlushTask]
    runs: list[Run]
    cleared: int = 0

    def __repr__(self) -> str:
        return discreet(self)

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first `count` tasks, and the others."""
        return Batch(self.tasks[:count], self.runs[:count]), Batch(
            self.tasks[count:], self.runs[count:], self.cleared
        )


class Holding(NamedTuple):
    """One block that a sink was told is resident. tokens: its own. tiers: a set."""

    key: bytes
    parent: bytes
    position: int
    tokens: bytes
    tiers: int
    origin: Origin
    extra_key: bytes = b""

    def __repr__(self) -> str:
        return discreet(self)


def as_task(run: Run, epoch: int, *, by_name: bool, step: int) -> Steps[FlushTask]:
    """What a sink is sent of a run. by_name: it needs no path."""
    first, last = run.entries[0], run.entries[-1]
    named: list[Entry] = []  # the blocks whose tokens are sent
    if not by_name:
        named = yield from path_to(last, step)
    elif run.resident:
        named = run.entries
    tokens = yield from gathered(named, TOKENS, step)
    extra_keys = yield from extra_keys_of(named, step)
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
        extra_keys,
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


def extra_keys_of(entries: list[Entry], step: int) -> Steps[ExtraKeys]:
    """(position, extra key) of those of the entries that have one."""
    found: list[tuple[int, bytes]] = []
    for i in range(0, len(entries), step):
        if i:
            yield
        found += [
            (entry.depth - 1, entry.extra_key) for entry in entries[i : i + step] if entry.extra_key
        ]
    return tuple(found)


def clear_task(tiers: int, epoch: int) -> FlushTask:
    """Everything is gone from every tier that a sink hears of."""
    return FlushTask(b"", 0, 0, b"", b"", Residency.GONE, Tier(tiers), Reason.CLEAR, epoch)


def path_tokens(entry: Entry) -> bytes:
    """The complete token path from the root to a block."""
    return finish(path_steps(entry, entry.depth))


def path_steps(entry: Entry, step: int) -> Steps[bytes]:
    """The same in steps."""
    path = yield from path_to(entry, step)
    return (yield from gathered(path, TOKENS, step))


def path_to(entry: Entry, step: int) -> Steps[list[Entry]]:
    """The blocks from the root to a block, in steps."""
    path: list[Entry] = []
    node: Entry | None = entry
    while node is not None:
        path.append(node)
        node = node.parent
        if not len(path) % step:
            yield
    path.reverse()
    return path
