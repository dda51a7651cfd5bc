"""Which differences of a sink go into its next batch, and their order: after every single event the
sink's view is a tree.

Gains come first, the shallowest first, then losses, the deepest first. A batch takes a gain only
together with the gains above it that are still to be sent, and a loss only together with the losses
below it, and with the gains of the same block. See `Ledger` for the rule that this keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from kvactors.flush_notifier.runs import BITS, LAST, UNSURE, Entry, Run, Steps
from kvactors.types import ALL_TIERS

LONGEST = 32_768
"""Blocks in one task at most: a longer run is sent in parts."""

PATHS = 4
"""A batch of n blocks may carry paths of PATHS x n blocks in all: many short runs deep in the tree
are sent in several batches."""

TIERS = int(ALL_TIERS)


def gain_of(entry: Entry, sink: int) -> int:
    """The tiers on which a block is to be announced: those that are due and not in the sink's view
    for certain."""
    state = entry.states[sink]
    return entry.dues[sink] & ~(state & ~(state >> UNSURE))


def loss_of(entry: Entry, sink: int) -> int:
    """The tiers on which a removal is to be sent: those that the sink's view may have and that are
    not due."""
    state = entry.states[sink]
    return (state | state >> UNSURE) & TIERS & ~entry.dues[sink]


class Selection:
    """The differences of a sink that go into one batch. gains, losses: sets of tiers by block."""

    def __init__(self, dirty: Mapping[Entry, int], sink: int, limit: int, step: int) -> None:
        self.gains: dict[Entry, int] = {}
        self.losses: dict[Entry, int] = {}
        self._dirty = dirty
        self._sink = sink
        self._limit = limit
        self._step = step
        self._looked = 0
        self._full = False
        self._gained: Entry | None = None  # the last one
        self._lost: Entry | None = None

    def steps(self) -> Iterator[None]:
        """Take about `limit` blocks, and never the first part of a run only, since every part would
        carry the path from the root again."""
        sink, gains, losses, step = self._sink, self.gains, self.losses, self._step
        for entry in self._dirty:
            due, state = entry.dues[sink], entry.states[sink]
            if (gain := due & ~(state & ~(state >> UNSURE))) and entry not in gains:
                above = entry.parent
                if (above is None or above in gains or not gain_of(above, sink)) and len(
                    gains
                ) < self._limit:
                    gains[entry] = gain  # the usual case: nothing above it is to be sent before
                    self._gained = entry
                else:
                    yield from self._gain(entry)
            if (
                (loss := (state | state >> UNSURE) & TIERS & ~due)
                and entry not in losses
                and not self._full
            ):
                if (
                    entry.child is None
                    and (not gain or entry in gains)
                    and len(gains) + len(losses) < self._limit
                ):
                    losses[entry] = loss  # the usual case: a leaf
                    self._lost = entry
                else:
                    yield from self._lose(entry)
            if self._full:
                return
            self._looked += 1
            if self._looked >= step:
                self._looked = 0
                yield

    def _count(self) -> bool:
        """One block more was looked at: whether a step is over."""
        self._looked += 1
        if self._looked < self._step:
            return False
        self._looked = 0
        return True

    def _gain(self, entry: Entry) -> Iterator[None]:
        """A gain, after those above it."""
        sink, gains = self._sink, self.gains
        chain, above = [entry], entry.parent
        while above is not None and above not in gains and gain_of(above, sink):
            chain.append(above)
            above = above.parent
            if self._count():
                yield
        if len(gains) + len(self.losses) >= self._limit and above is not self._gained:
            self._full = True
            return
        while chain:
            one = chain.pop()
            gains[one] = gain_of(one, sink)
            if self._count():
                yield
        self._gained = entry

    def _lose(self, top: Entry) -> Iterator[None]:
        """A loss, after those below it. If there are too many, as many of those as there is room
        for."""
        sink, losses = self._sink, self.losses
        node: Entry = top
        below = top.child
        while True:
            while below is not None and (below in losses or not loss_of(below, sink)):
                below = below.right
                if self._count():
                    yield
            if below is not None:
                node, below = below, below.child
                if self._count():
                    yield
                continue
            if len(self.gains) + len(losses) >= self._limit and (
                self._lost is None or self._lost.parent is not node
            ):
                self._full = True
                return
            if gain_of(node, sink) and node not in self.gains:
                yield from self._gain(node)
                if self._full:
                    return
            losses[node] = loss_of(node, sink)
            self._lost = node
            if self._count():
                yield
            if node is top or node.parent is None:
                return
            node, below = node.parent, node.right

    def by_tier(self) -> Steps[tuple[dict[int, list[Entry]], dict[int, list[Entry]]]]:
        """Gains and losses as lists of blocks by tier."""
        lists: tuple[dict[int, list[Entry]], dict[int, list[Entry]]] = {}, {}
        for chosen, of_tier in zip((self.gains, self.losses), lists, strict=True):
            for entry, tiers in chosen.items():
                for bit in BITS[tiers]:
                    of_tier.setdefault(bit, []).append(entry)
                if self._count():
                    yield
        return lists


def runs_of(selection: Selection, *, node: bool, paths: int | None, step: int) -> Steps[list[Run]]:
    """Changes as runs, in the order in which they are sent. node: a sink that takes all tiers as
    one. paths: of a sink that needs paths, the blocks of a batch: the first runs only, whose paths
    are not much longer."""
    gains, losses = yield from selection.by_tier()
    runs: list[Run] = []
    for bit, some in gains.items():
        runs += yield from join(
            some, bit, resident=True, reason_index=LAST if node else bit, step=step
        )
    # Losses on several tiers: a run ends where the set of tiers changes or a branch begins, so that
    # runs can be ordered by depth alone.
    alike = selection.losses if len(losses) > 1 else None
    for bit, some in losses.items():
        runs += yield from join(
            some, bit, resident=False, reason_index=LAST if node else bit, step=step, alike=alike
        )
    return ordered(runs) if paths is None else list(within(ordered(runs), PATHS * paths))


def join(
    entries: Collection[Entry],
    bit: int,
    *,
    resident: bool,
    reason_index: int,
    step: int,
    alike: Mapping[Entry, int] | None = None,
) -> Steps[list[Run]]:
    """Runs of entries, each as long as the parent chain goes on within them with one reason; a
    branch point splits, and so does LONGEST. Linear; yields after each `step` blocks. alike: more
    blocks than these, with a value each: a branch among them all splits, and so does another
    value."""
    if len(entries) == 1:
        return [Run([one], bit, resident, one.reasons[reason_index]) for one in entries]
    heir = yield from heirs(entries if alike is None else alike, step)
    looked = 0
    runs: list[Run] = []
    for entry in entries:
        looked += 1
        if not looked % step:
            yield
        reason, parent = entry.reasons[reason_index], entry.parent
        if (
            parent is not None
            and heir.get(parent) is entry
            and parent.reasons[reason_index] is reason
            and (alike is None or alike[parent] == alike[entry])
        ):
            continue  # its parent's run has it
        run, below = [entry], heir.get(entry)
        while (
            below is not None
            and below.reasons[reason_index] is reason
            and (alike is None or alike[below] == alike[entry])
        ):
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


def heirs(members: Collection[Entry], step: int) -> Steps[dict[Entry, Entry | None]]:
    """Of each member that has children among the members, its only child there; None if there are
    several."""
    found: set[Entry] = set()
    looked = 0
    for entry in members:
        found.add(entry)
        looked += 1
        if not looked % step:
            yield
    heir: dict[Entry, Entry | None] = {}
    for entry in members:
        parent = entry.parent
        if parent is not None and parent in found:
            heir[parent] = None if parent in heir else entry
        looked += 1
        if not looked % step:
            yield
    return heir


def ordered(runs: Iterable[Run]) -> list[Run]:
    """Gains first, the shallowest first; then losses, the deepest first. So a block that moves
    between tiers is never nowhere in between."""
    return sorted(
        runs,
        key=lambda run: (
            not run.resident,
            run.entries[0].depth if run.resident else -run.entries[-1].depth,
        ),
    )


def within(runs: list[Run], blocks: int) -> Iterator[Run]:
    """The first runs (one at least) whose paths have `blocks` blocks in all."""
    for i, run in enumerate(runs):
        blocks -= run.entries[-1].depth
        if i and blocks < 0:
            return
        yield run
