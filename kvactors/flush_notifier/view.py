"""A sink's view: what it is sent at all, the acknowledged blocks, their difference from the due
state, and the next batch of changes to send. After every single event the view is a tree (see
`ledger`).

In a batch gains come first, the shallowest first, then losses, the deepest first. A batch takes a
gain only together with the gains above it that are still to be sent, and a loss only together with
the losses below it and the gains of the same block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvactors.actor.sliced import Sliced
from kvactors.flush_notifier.blocks import BITS, LAST, REASONS, UNSURE, HeldBlock, LedgerTree
from kvactors.flush_notifier.messages import FlushTask
from kvactors.redact import redacted_repr
from kvactors.types import ALL_TIERS, Reason, Residency, Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.sinks.base import Sink


MAX_RUN_BLOCKS = 32_768  # in one task: a longer run is sent in parts
PATHS = 4
"""A batch of n blocks may carry paths of PATHS x n blocks in all: many short runs deep in the tree
are sent in several batches."""

TIER_OF = {int(tier): tier for tier in Tier}
"""By bit. `Tier(bit)` takes as long as the rest of a short task."""

TIERS = int(ALL_TIERS)
SHIFT = 3  # bits of a set of tiers
ABOVE_ALL = TIERS  # in place of the due state of the block above the first block of a path


class BlockRun(NamedTuple):
    """Blocks in path order, each the parent of the next, that change alike on the tier `bit`."""

    blocks: list[int]
    bit: int
    resident: bool
    reason: Reason

    def __repr__(self) -> str:
        return redacted_repr(self)


class Selection:
    """The differences of a sink that go into one batch: sets of tiers by block."""

    def __init__(self, view: SinkView, limit: int) -> None:
        self.gains: dict[int, int] = {}
        self.losses: dict[int, int] = {}
        self._view = view
        self._tree = view.tree
        self._limit = limit
        self._full = False
        self._gained = self._lost = 0  # the last ones

    def choose(self) -> Iterator[None]:
        """Take about `limit` blocks. A run is taken whole, since each of its parts would carry the
        path from the root."""
        view, gains, losses = self._view, self.gains, self.losses
        parent, child, gain_of, loss_of = self._tree.parent, self._tree.child, view.gain, view.loss
        for block in view.dirty:
            gain, loss = gain_of(block), loss_of(block)
            if gain and block not in gains:
                above = parent[block]
                if (not above or above in gains or not gain_of(above)) and len(gains) < self._limit:
                    gains[block] = gain  # the usual case: no gain above it is pending
                    self._gained = block
                else:
                    yield from self._gain(block)
            if loss and block not in losses and not self._full:
                if (
                    not child[block]
                    and (not gain or block in gains)
                    and len(gains) + len(losses) < self._limit
                ):
                    losses[block] = loss  # the usual case: a leaf
                    self._lost = block
                else:
                    yield from self._lose(block)
            if self._full:
                return
            yield

    def _gain(self, block: int) -> Iterator[None]:
        gains, gain_of, parent = self.gains, self._view.gain, self._tree.parent
        chain, above = [block], parent[block]
        while above and above not in gains and gain_of(above):
            chain.append(above)
            above = parent[above]
            yield
        if len(gains) + len(self.losses) >= self._limit and (not above or above != self._gained):
            self._full = True
            return
        while chain:
            one = chain.pop()
            gains[one] = gain_of(one)
            yield
        self._gained = block

    def _lose(self, top: int) -> Iterator[None]:
        """Take a loss, after the losses below it, as many of them as fit."""
        tree, losses, loss_of = self._tree, self.losses, self._view.loss
        node, below = top, tree.child[top]
        while True:
            while below and (below in losses or not loss_of(below)):
                below = tree.right[below]
                yield
            if below:
                node, below = below, tree.child[below]
                yield
                continue
            if len(self.gains) + len(losses) >= self._limit and (
                not self._lost or tree.parent[self._lost] != node
            ):
                self._full = True
                return
            if self._view.gain(node) and node not in self.gains:
                yield from self._gain(node)
                if self._full:
                    return
            losses[node] = loss_of(node)
            self._lost = node
            yield
            if node == top or not tree.parent[node]:
                return
            node, below = tree.parent[node], tree.right[node]

    # -- runs

    def runs(self, *, node: bool, paths: bool) -> Sliced[list[BlockRun]]:
        """The differences as runs, in the order in which they are sent. For a sink that is sent
        paths only the first runs, whose paths are not much longer than the batch."""
        gains: dict[int, list[int]] = {}
        losses: dict[int, list[int]] = {}
        depth = self._tree.depth
        for chosen, of_tier in ((self.gains, gains), (self.losses, losses)):
            for block, tiers in chosen.items():
                for bit in BITS[tiers]:
                    of_tier.setdefault(bit, []).append(block)
                yield
        runs: list[BlockRun] = []
        for bit, blocks in gains.items():
            runs += yield from self._join(blocks, bit, resident=True, index=LAST if node else bit)
        # With losses on several tiers a run ends where the set of tiers changes or a branch begins,
        # so that depth alone orders the runs.
        alike = self.losses if len(losses) > 1 else None
        for bit, blocks in losses.items():
            runs += yield from self._join(
                blocks, bit, resident=False, index=LAST if node else bit, alike=alike
            )

        # Gains first: a block that moves between tiers is on one of them in every view between.
        def place(run: BlockRun) -> tuple[bool, int]:
            return not run.resident, depth[run.blocks[0]] if run.resident else -depth[
                run.blocks[-1]
            ]

        runs.sort(key=place)
        if paths:
            left = PATHS * self._limit
            for i, run in enumerate(runs):
                left -= depth[run.blocks[-1]]
                if i and left < 0:
                    return runs[:i]
        return runs

    def _join(
        self,
        blocks: Collection[int],
        bit: int,
        *,
        resident: bool,
        index: int,
        alike: Mapping[int, int] | None = None,
    ) -> Sliced[list[BlockRun]]:
        """Join blocks into runs, in linear time. A run follows the parent chain while the reason
        stays the same. It ends at a branch and at MAX_RUN_BLOCKS. alike: further blocks, each with
        a value. A branch among them all ends a run, and so does another value."""
        reasons, parent = self._tree.reasons[index], self._tree.parent
        if len(blocks) == 1:
            return [BlockRun([one], bit, resident, REASONS[reasons[one]]) for one in blocks]
        heirs = yield from self._heirs(blocks if alike is None else alike, index, alike)
        runs: list[BlockRun] = []
        for block in blocks:
            yield
            number = reasons[block]
            if heirs.get(parent[block]) == block:
                continue  # part of its parent's run
            run, below = [block], heirs.get(block)
            while below:
                if len(run) == MAX_RUN_BLOCKS:
                    runs.append(BlockRun(run, bit, resident, REASONS[number]))
                    run = []
                run.append(below)
                below = heirs.get(below)
                yield
            runs.append(BlockRun(run, bit, resident, REASONS[number]))
        return runs

    def _heirs(
        self, members: Collection[int], index: int, alike: Mapping[int, int] | None
    ) -> Sliced[dict[int, int]]:
        """By member that has children among the members: its only child there, 0 if there are
        several or the child changes otherwise."""
        reasons = self._tree.reasons[index]
        found: set[int] = set()
        for block in members:
            found.add(block)
            yield
        heirs: dict[int, int] = {}
        for block in members:
            parent = self._tree.parent[block]
            if parent in found:
                same = reasons[parent] == reasons[block]
                same = same and (alike is None or alike[parent] == alike[block])
                heirs[parent] = block if same and parent not in heirs else 0
            yield
        return heirs


class DeliveryBatch(NamedTuple):
    """One delivery: the tasks, and the runs behind them one for one. cleared: whether the only task
    removes everything."""

    tasks: list[FlushTask]
    runs: list[BlockRun]
    cleared: bool = False

    def __repr__(self) -> str:
        return redacted_repr(self)

    def split(self, count: int) -> tuple[DeliveryBatch, DeliveryBatch]:
        first = DeliveryBatch(self.tasks[:count], self.runs[:count])
        return first, DeliveryBatch(self.tasks[count:], self.runs[count:], self.cleared)


def as_task(tree: LedgerTree, run: BlockRun, epoch: int, *, by_name: bool) -> Sliced[FlushTask]:
    """The task of a run. by_name: see `Sink.by_name`."""
    path = run.blocks if run.resident else []  # the blocks whose tokens are sent
    if not by_name:
        path = yield from tree.path_to(run.blocks[-1])
    extra_keys: list[tuple[int, bytes]] = []
    for block in path if tree.has_extra_keys else ():
        if extra_key := tree.extra_key(block):
            extra_keys.append((tree.depth[block] - 1, extra_key))
        yield
    first = run.blocks[0]
    return FlushTask(
        tree.rows.tokens_of(path),
        tree.depth[first] - 1,
        len(run.blocks),
        tree.rows.hashes_of(run.blocks),
        tree.parent_hash(first),
        Residency.RESIDENT if run.resident else Residency.GONE,
        TIER_OF[run.bit],
        run.reason,
        epoch,
        tree.scope(first),
        tuple(extra_keys),
    )


class SinkFilter(NamedTuple):
    """The changes that one sink is sent. The ledger asks nothing else about a sink.

    Attributes:
        node: one fact for all tiers, as Tier.DEVICE: resident while any of them holds the block.
        at_finish: gains are due when a request that covers the block finishes.
    """

    tiers: int
    node: bool
    at_finish: bool
    by_tokens: bool = False
    by_name: bool = False
    takes_clear: bool = False
    announces_full: bool = False

    @classmethod
    def of(cls, sink: Sink) -> SinkFilter:
        names = ("by_name", "takes_clear", "announces_full")
        return sink.filter._replace(**{name: getattr(sink, name) for name in names})

    def accepts(self, tree: LedgerTree, block: int) -> bool:
        finished = tree.finished[block] or not self.at_finish
        return bool(finished and (tree.token_addressed[block] or not self.by_tokens))

    def table(self) -> tuple[int, ...]:
        """By the tiers that hold a block: where to announce it, without regard to its parent."""
        sets = (tiers & self.tiers for tiers in range(ALL_TIERS + 1))
        return tuple(int(Tier.DEVICE) * bool(tiers) if self.node else tiers for tiers in sets)

    def closed(self) -> tuple[int, ...]:
        """The due state of a block, by that of its parent, shifted by SHIFT, and its own tiers.
        Nothing is due below a block that is not due, and DEVICE only below DEVICE."""
        table = self.table()
        below_other_tiers = tuple(tiers & ~int(Tier.DEVICE) for tiers in table)
        closed = (0,) * len(table)
        for above in range(1, ALL_TIERS + 1):
            closed += table if above & Tier.DEVICE else below_other_tiers
        return closed


class SinkView:
    """One sink's side of the ledger. All work yields after every block.

    Attributes:
        due: by block, the tiers on which it is to be announced (see `Ledger`).
        held: the column of `LedgerTree.views` of this sink.
        conditional: whether the filter excludes some blocks altogether.
        dirty: blocks whose view differs from the due state, with the clock at which each began to
            differ, in that order.
        coalesced: differences that ended before they were sent.
        clear_due: everything in the view was removed at once, and the sink was not sent that.
        repeated: the blocks left of a repetition of the view, None without one.
    """

    def __init__(self, tree: LedgerTree, sink_filter: SinkFilter) -> None:
        self.tree = tree
        self.due, self.held = tree.column(), tree.column()
        tree.views.append(self.held)
        self.filter = sink_filter
        self.table = sink_filter.table()
        self.closed = sink_filter.closed()
        self.conditional = sink_filter.at_finish or sink_filter.by_tokens
        self.dirty: dict[int, int] = {}
        self.clock = 0
        self.coalesced = 0
        self.clear_due = False
        self.repeated: Iterator[int] | None = None

    @property
    def pending(self) -> int:
        return len(self.dirty)

    @property
    def delivered_until(self) -> int:
        """Every difference that began up to this `clock` was delivered, or has ended."""
        return next(iter(self.dirty.values()), self.clock + 1) - 1

    def gain(self, block: int) -> int:
        """The tiers on which to announce a block: due, and not in the view for certain."""
        view = self.held[block]
        return self.due[block] & ~(view & ~(view >> UNSURE))

    def loss(self, block: int) -> int:
        """The tiers on which to send a removal: possibly in the view, and not due."""
        view = self.held[block]
        return (view | view >> UNSURE) & TIERS & ~self.due[block]

    # -- changes

    def compare(self, block: int) -> None:
        """The view of a block changed: record whether it differs from the due state."""
        if self.due[block] != self.held[block]:
            if block not in self.dirty:
                self.clock += 1
                self.dirty[block] = self.clock
        elif block in self.dirty:
            del self.dirty[block]
            self.coalesced += block not in self.tree.pins
        if not self.tree.tiers[block] and self.tree.is_idle(block):
            self.tree.note_idle(block)

    def doubt(self, block: int) -> None:
        """The sink may have lost a block of its view: the block is sent again."""
        self.held[block] |= (self.held[block] & TIERS) << UNSURE

    # -- deliveries

    def take(self, limit: int, epoch: int) -> Sliced[DeliveryBatch]:
        """Make the next batch of about `limit` blocks, in flight until `delivered` or `refused`. No
        fact may come before the end."""
        tree, by_name = self.tree, self.filter.by_name
        if self.clear_due:
            self.clear_due = False
            if self.dirty:
                gone, tiers = Residency.GONE, Tier(self.filter.tiers)
                task = FlushTask(b"", 0, 0, b"", b"", gone, tiers, Reason.CLEAR, epoch)
                return DeliveryBatch([task], [], cleared=True)
        tree.begin()
        while self.repeated is not None and len(self.dirty) < limit:
            if block := next(self.repeated, 0):
                self._send_again(block)
            else:
                self.repeated = None
            yield
        selection = Selection(self, limit)
        yield from selection.choose()
        runs = yield from selection.runs(node=self.filter.node, paths=not by_name)
        tasks = []
        for run in runs:
            tasks.append((yield from as_task(tree, run, epoch, by_name=by_name)))
            for block in run.blocks:
                tree.pin(block)
                yield
        yield from tree.end()
        return DeliveryBatch(tasks, runs)

    def delivered(self, batch: DeliveryBatch) -> Iterator[None]:
        """The sink acknowledged a batch: it is the view now, even if blocks have changed since.
        After a clear, blocks that have come back since differ."""
        tree, held, due, dirty = self.tree, self.held, self.due, self.dirty
        tree.begin()
        sent: dict[int, int] = {}
        for blocks, bit, resident, _ in batch.runs:
            settled, view = ~(bit | bit << UNSURE), bit if resident else 0
            for block in blocks if resident else reversed(blocks):
                held[block] = held[block] & settled | view
                sent[block] = sent.get(block, 0) | bit | bit << UNSURE
                yield
        for block, bits in sent.items():
            if not (due[block] ^ held[block]) & ~bits:
                dirty.pop(block, None)  # a new difference among the sent changes began later
            yield
        if batch.cleared:
            yield from tree.change_all(self._clear)
        yield from self._release(batch)

    def refused(self, batch: DeliveryBatch) -> Iterator[None]:
        """The sink did not acknowledge a batch. It may have taken any part of it: all of it is sent
        again, as far as it is due then."""
        tree = self.tree
        tree.begin()
        if batch.cleared:
            self.clear_due = True
            yield from tree.change_all(self._send_again)
        for run in batch.runs:
            for block in run.blocks:
                self.held[block] |= run.bit << UNSURE
                yield
        yield from self._release(batch)

    def _release(self, batch: DeliveryBatch) -> Iterator[None]:
        for run in batch.runs:
            for block in run.blocks:
                self.compare(block)
                yield
        for run in batch.runs:
            for block in reversed(run.blocks):  # the deepest first, since it is removed first
                self.tree.unpin(block)
                yield
        yield from self.tree.end()

    # -- resync

    def reset(self) -> Iterator[None]:
        """The sink's index is empty, and no delivery is in flight: everything that is due is sent
        again. No fact may come before the end."""
        self.clear_due = False
        yield from self.tree.change_all(self._lose)

    def repeat(self) -> None:
        """The sink's index may have lost any part of the view: the next batches have all of it
        again, parents before children, after the changes that are pending. Nothing is removed
        first."""
        self.repeated = self.tree.scan()

    def _lose(self, block: int) -> None:
        if self.held[block]:
            self.held[block] = 0
            self.compare(block)

    def _clear(self, block: int) -> None:
        """The sink removed a block with all others. If it is due, that is a new difference."""
        if self.held[block]:
            self.dirty.pop(block, None)
            self._lose(block)

    def _send_again(self, block: int) -> None:
        if self.held[block] & TIERS:
            self.doubt(block)
            self.compare(block)

    # -- inspection

    def held_blocks(self) -> Iterator[HeldBlock]:
        """See `SnapshotSource`."""
        tree, held = self.tree, bytes(self.held)
        for block in tree.scan():  # a block that is added later is not in the scan
            yield HeldBlock(
                tree.rows.hash(block),
                tree.parent_hash(block),
                tree.depth[block] - 1,
                tree.rows.tokens_of([block]),
                held[block] & TIERS,
                tree.scope(block),
                tree.extra_key(block),
            )
