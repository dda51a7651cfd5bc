"""A sink's view: what it is sent at all, the acknowledged blocks, their difference from the due
state, and the next batch of changes to send. After every single event the view is a tree (see
`ledger`).

In a batch gains come first, the shallowest first, then losses, the deepest first. A batch takes a
gain only together with the gains above it that are still to be sent, and a loss only together with
the losses below it and the gains of the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kvactors.actor.sliced import Sliced, pace
from kvactors.flush_notifier.blocks import (
    BITS,
    LAST,
    REASONS,
    UNSURE,
    HeldBlock,
    LedgerBlock,
    LedgerTree,
    path_to,
)
from kvactors.flush_notifier.messages import ExtraKeys, FlushTask
from kvactors.redact import redacted_repr
from kvactors.types import ALL_TIERS, Reason, Residency, Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.sinks.base import Sink


MAX_RUN_BLOCKS = 32_768  # in one task: a longer run is sent in parts
PATHS = 4
"""A batch of n blocks may carry paths of PATHS x n blocks in all: many short runs deep in the tree
are sent in several batches."""

HASH: Callable[[LedgerBlock], bytes] = attrgetter("hash")
TOKENS: Callable[[LedgerBlock], bytes] = attrgetter("tokens")

TIER_OF = {int(tier): tier for tier in Tier}
"""By bit. `Tier(bit)` takes as long as the rest of a short task."""

TIERS = int(ALL_TIERS)
SHIFT = 3  # bits of a set of tiers
ABOVE_ALL = TIERS  # in place of the due state of the block above the first block of a path


def gain_of(block: LedgerBlock, sink: int) -> int:
    """The tiers on which to announce a block: due, and not in the sink's view for certain."""
    view = block.views[sink]
    return block.due[sink] & ~(view & ~(view >> UNSURE))


def loss_of(block: LedgerBlock, sink: int) -> int:
    """The tiers on which a removal is to be sent: possibly in the sink's view, and not due."""
    view = block.views[sink]
    return (view | view >> UNSURE) & TIERS & ~block.due[sink]


class BlockRun(NamedTuple):
    """Blocks in path order, each the parent of the next, that change alike on the tier `bit`."""

    blocks: list[LedgerBlock]
    bit: int
    resident: bool
    reason: Reason

    def __repr__(self) -> str:
        return redacted_repr(self)


class Selection:
    """The differences of a sink that go into one batch: sets of tiers by block."""

    def __init__(self, dirty: Mapping[LedgerBlock, int], sink: int, limit: int, step: int) -> None:
        self.gains: dict[LedgerBlock, int] = {}
        self.losses: dict[LedgerBlock, int] = {}
        self._dirty = dirty
        self._sink = sink
        self._limit = limit
        self._step = step
        self._over = pace(step)
        self._full = False
        self._gained: LedgerBlock | None = None  # the last one
        self._lost: LedgerBlock | None = None

    def choose(self) -> Iterator[None]:
        """Take about `limit` blocks. A run is taken whole, since each of its parts would carry the
        path from the root."""
        sink, gains, losses, over = self._sink, self.gains, self.losses, self._over
        for block in self._dirty:
            due, view = block.due[sink], block.views[sink]
            if (gain := due & ~(view & ~(view >> UNSURE))) and block not in gains:
                above = block.parent
                if (above is None or above in gains or not gain_of(above, sink)) and len(
                    gains
                ) < self._limit:
                    gains[block] = gain  # the usual case: no gain above it is pending
                    self._gained = block
                else:
                    yield from self._gain(block)
            if (
                (loss := (view | view >> UNSURE) & TIERS & ~due)
                and block not in losses
                and not self._full
            ):
                if (
                    block.child is None
                    and (not gain or block in gains)
                    and len(gains) + len(losses) < self._limit
                ):
                    losses[block] = loss  # the usual case: a leaf
                    self._lost = block
                else:
                    yield from self._lose(block)
            if self._full:
                return
            if over():
                yield

    def _gain(self, block: LedgerBlock) -> Iterator[None]:
        sink, gains = self._sink, self.gains
        chain, above = [block], block.parent
        while above is not None and above not in gains and gain_of(above, sink):
            chain.append(above)
            above = above.parent
            if self._over():
                yield
        if len(gains) + len(self.losses) >= self._limit and above is not self._gained:
            self._full = True
            return
        while chain:
            one = chain.pop()
            gains[one] = gain_of(one, sink)
            if self._over():
                yield
        self._gained = block

    def _lose(self, top: LedgerBlock) -> Iterator[None]:
        """Take a loss, after the losses below it, as many of them as fit."""
        sink, losses = self._sink, self.losses
        node: LedgerBlock = top
        below = top.child
        while True:
            while below is not None and (below in losses or not loss_of(below, sink)):
                below = below.right
                if self._over():
                    yield
            if below is not None:
                node, below = below, below.child
                if self._over():
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
            if self._over():
                yield
            if node is top or node.parent is None:
                return
            node, below = node.parent, node.right

    # -- runs

    def runs(self, *, node: bool, paths: bool) -> Sliced[list[BlockRun]]:
        """The differences as runs, in the order in which they are sent. For a sink that is sent
        paths only the first runs, whose paths are not much longer than the batch."""
        gains: dict[int, list[LedgerBlock]] = {}
        losses: dict[int, list[LedgerBlock]] = {}
        for chosen, of_tier in ((self.gains, gains), (self.losses, losses)):
            for block, tiers in chosen.items():
                for bit in BITS[tiers]:
                    of_tier.setdefault(bit, []).append(block)
                if self._over():
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
            return not run.resident, run.blocks[0].depth if run.resident else -run.blocks[-1].depth

        runs.sort(key=place)
        if paths:
            left = PATHS * self._limit
            for i, run in enumerate(runs):
                left -= run.blocks[-1].depth
                if i and left < 0:
                    return runs[:i]
        return runs

    def _join(
        self,
        blocks: Collection[LedgerBlock],
        bit: int,
        *,
        resident: bool,
        index: int,
        alike: Mapping[LedgerBlock, int] | None = None,
    ) -> Sliced[list[BlockRun]]:
        """Join blocks into runs, in linear time. A run follows the parent chain while the reason
        stays the same. It ends at a branch and at MAX_RUN_BLOCKS. alike: further blocks, each with
        a value. A branch among them all ends a run, and so does another value."""
        if len(blocks) == 1:
            return [BlockRun([one], bit, resident, REASONS[one.reasons[index]]) for one in blocks]
        heirs = yield from self._heirs(blocks if alike is None else alike, index, alike)
        over = pace(self._step)
        runs: list[BlockRun] = []
        for block in blocks:
            if over():
                yield
            number, parent = block.reasons[index], block.parent
            if parent is not None and heirs.get(parent) is block:
                continue  # part of its parent's run
            run, below = [block], heirs.get(block)
            while below is not None:
                if len(run) == MAX_RUN_BLOCKS:
                    runs.append(BlockRun(run, bit, resident, REASONS[number]))
                    run = []
                run.append(below)
                below = heirs.get(below)
                if over():
                    yield
            runs.append(BlockRun(run, bit, resident, REASONS[number]))
        return runs

    def _heirs(
        self, members: Collection[LedgerBlock], index: int, alike: Mapping[LedgerBlock, int] | None
    ) -> Sliced[dict[LedgerBlock, LedgerBlock | None]]:
        """By member that has children among the members: its only child there, None if there are
        several or the child changes otherwise."""
        over = pace(self._step)
        found: set[LedgerBlock] = set()
        for block in members:
            found.add(block)
            if over():
                yield
        heirs: dict[LedgerBlock, LedgerBlock | None] = {}
        for block in members:
            parent = block.parent
            if parent is not None and parent in found:
                same = parent.reasons[index] == block.reasons[index]
                same = same and (alike is None or alike[parent] == alike[block])
                heirs[parent] = block if same and parent not in heirs else None
            if over():
                yield
        return heirs


class DeliveryBatch(NamedTuple):
    """One delivery: the tasks, and the runs behind them one for one. cleared: not 0 if the only
    task removes everything: every block numbered up to it."""

    tasks: list[FlushTask]
    runs: list[BlockRun]
    cleared: int = 0

    def __repr__(self) -> str:
        return redacted_repr(self)

    def split(self, count: int) -> tuple[DeliveryBatch, DeliveryBatch]:
        first = DeliveryBatch(self.tasks[:count], self.runs[:count])
        return first, DeliveryBatch(self.tasks[count:], self.runs[count:], self.cleared)


def as_task(run: BlockRun, epoch: int, *, by_name: bool, step: int) -> Sliced[FlushTask]:
    """The task of a run. by_name: see `Sink.by_name`."""
    first, last = run.blocks[0], run.blocks[-1]
    if by_name and first is last:  # the usual case while blocks come one by one
        tokens = first.tokens if run.resident else b""
        own = run.resident and first.extra_key
        extra_keys: ExtraKeys = ((first.depth - 1, own),) if own else ()
        hashes = first.hash
    else:
        path: list[LedgerBlock] = []  # the blocks whose tokens are sent
        if not by_name:
            path = yield from path_to(last, step)
        elif run.resident:
            path = run.blocks
        tokens = yield from gathered(path, TOKENS, step)
        extra_keys = yield from extra_keys_of(path, step)
        hashes = yield from gathered(run.blocks, HASH, step)
    return FlushTask(
        tokens,
        first.depth - 1,
        len(run.blocks),
        hashes,
        first.parent_hash,
        Residency.RESIDENT if run.resident else Residency.GONE,
        TIER_OF[run.bit],
        run.reason,
        epoch,
        first.scope,
        extra_keys,
    )


def gathered(
    blocks: list[LedgerBlock], field: Callable[[LedgerBlock], bytes], step: int
) -> Sliced[bytes]:
    """A field of all blocks as one buffer."""
    if len(blocks) <= step:
        return b"".join(map(field, blocks))
    whole = bytearray()
    for i in range(0, len(blocks), step):
        whole += b"".join(map(field, blocks[i : i + step]))
        yield
    return bytes(whole)


def extra_keys_of(blocks: list[LedgerBlock], step: int) -> Sliced[ExtraKeys]:
    """(position, extra key) of the blocks that have one."""
    found: list[tuple[int, bytes]] = []
    for i in range(0, len(blocks), step):
        if i:
            yield
        found += [
            (block.depth - 1, block.extra_key) for block in blocks[i : i + step] if block.extra_key
        ]
    return tuple(found)


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

    def accepts(self, block: LedgerBlock) -> bool:
        return (block.finished or not self.at_finish) and (
            block.token_addressed or not self.by_tokens
        )

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
    """One sink's side of the ledger. All work is in slices.

    Attributes:
        index: position of this sink in `LedgerBlock.due` and `LedgerBlock.views`.
        conditional: whether the filter excludes some blocks altogether.
        dirty: blocks whose view differs from the due state, with the clock at which each began to
            differ, in that order.
        coalesced: differences that ended before they were sent.
        clear_due: everything in the view was removed at once, and the sink was not sent that.
    """

    def __init__(self, tree: LedgerTree, index: int, sink_filter: SinkFilter) -> None:
        self.tree = tree
        self.index = index
        self.filter = sink_filter
        self.table = sink_filter.table()
        self.closed = sink_filter.closed()
        self.conditional = sink_filter.at_finish or sink_filter.by_tokens
        self.dirty: dict[LedgerBlock, int] = {}
        self.clock = 0
        self.coalesced = 0
        self.clear_due = False

    @property
    def pending(self) -> int:
        return len(self.dirty)

    @property
    def delivered_until(self) -> int:
        """Every difference that began up to this `clock` was delivered, or has ended."""
        return next(iter(self.dirty.values()), self.clock + 1) - 1

    # -- changes

    def compare(self, block: LedgerBlock) -> None:
        """The view of a block changed: record whether it differs from the due state."""
        if block.due[self.index] != block.views[self.index]:
            if block not in self.dirty:
                self.clock += 1
                self.dirty[block] = self.clock
        elif block in self.dirty:
            del self.dirty[block]
            self.coalesced += not block.pins
        if not block.tiers and block.idle():
            self.tree.note_idle(block)

    def doubt(self, block: LedgerBlock) -> None:
        """The sink may have lost a block of its view: the block is sent again."""
        block.views[self.index] |= (block.views[self.index] & TIERS) << UNSURE

    # -- deliveries

    def take(self, limit: int, epoch: int) -> Sliced[DeliveryBatch]:
        """Make the next batch of about `limit` blocks, in flight until `delivered` or `refused`.
        The ledger must not change between the slices."""
        tree, by_name = self.tree, self.filter.by_name
        if self.clear_due:
            self.clear_due = False
            if self.dirty:
                gone, tiers = Residency.GONE, Tier(self.filter.tiers)
                task = FlushTask(b"", 0, 0, b"", b"", gone, tiers, Reason.CLEAR, epoch)
                return DeliveryBatch([task], [], tree.last_number)
        selection = Selection(self.dirty, self.index, limit, tree.step)
        yield from selection.choose()
        runs = yield from selection.runs(node=self.filter.node, paths=not by_name)
        tasks = []
        for run in runs:
            tasks.append((yield from as_task(run, epoch, by_name=by_name, step=tree.step)))
            for i, block in enumerate(run.blocks, 1):
                block.pins += 1
                if not i % tree.step:
                    yield
        return DeliveryBatch(tasks, runs)

    def delivered(self, batch: DeliveryBatch) -> Iterator[None]:
        """The sink acknowledged a batch: it is the view now, even if blocks have changed since.
        After a clear, blocks that have come back since differ."""
        tree, index, dirty = self.tree, self.index, self.dirty
        tree.begin()
        sent: dict[LedgerBlock, int] = {}
        over = pace(tree.step)
        for blocks, bit, resident, _ in batch.runs:
            settled, view = ~(bit | bit << UNSURE), bit if resident else 0
            for block in blocks if resident else reversed(blocks):
                block.views[index] = block.views[index] & settled | view
                sent[block] = sent.get(block, 0) | bit | bit << UNSURE
                if over():
                    yield
        for i, (block, bits) in enumerate(sent.items(), 1):
            if not (block.due[index] ^ block.views[index]) & ~bits:
                dirty.pop(block, None)  # a new difference among the sent changes began later
            if not i % tree.step:
                yield
        if batch.cleared:
            yield from tree.change_all(self._clear, batch.cleared)
        yield from self._release(batch)

    def refused(self, batch: DeliveryBatch) -> Iterator[None]:
        """The sink did not acknowledge a batch. It may have taken any part of it: all of it is sent
        again, as far as it is due then."""
        tree, index = self.tree, self.index
        tree.begin()
        if batch.cleared:
            self.clear_due = True
            yield from tree.change_all(self._send_again, batch.cleared)
        over = pace(tree.step)
        for run in batch.runs:
            for block in run.blocks:
                block.views[index] |= run.bit << UNSURE
                if over():
                    yield
        yield from self._release(batch)

    def _release(self, batch: DeliveryBatch) -> Iterator[None]:
        tree, over = self.tree, pace(self.tree.step)
        for run in batch.runs:
            for block in run.blocks:
                self.compare(block)
                if over():
                    yield
        for run in batch.runs:
            for block in reversed(run.blocks):  # the deepest first, since it is removed first
                tree.unpin(block)
                if over():
                    yield
                    tree.version += 1
        yield from tree.end()

    # -- resync

    def reset(self) -> Iterator[None]:
        """The sink's index is empty, and no delivery is in flight: everything that is due is sent
        again. The ledger must not change between the slices."""
        self.clear_due = False
        yield from self.tree.change_all(self._lose)

    def repeat(self) -> Iterator[None]:
        """The sink's index may have lost any part of the view: all of it is sent again, parents
        before children. Nothing is removed first, and the ledger may change between the slices."""
        for i, block in enumerate(self.tree.scan(), 1):
            self._send_again(block)
            if not i % self.tree.step:
                yield

    def _lose(self, block: LedgerBlock) -> None:
        if block.views[self.index]:
            block.views[self.index] = 0
            self.compare(block)

    def _clear(self, block: LedgerBlock) -> None:
        """The sink removed a block with all others. If it is due, that is a new difference."""
        if block.views[self.index]:
            self.dirty.pop(block, None)
            self._lose(block)

    def _send_again(self, block: LedgerBlock) -> None:
        if block.views[self.index] & TIERS:
            self.tree.version += 1
            self.doubt(block)
            self.compare(block)

    # -- inspection

    def held_blocks(self, *, every: bool = False) -> Iterator[HeldBlock]:
        for block in self.tree.scan():
            if (tiers := block.views[self.index] & TIERS) or every:
                place = block.hash, block.parent_hash, block.depth - 1, block.tokens
                yield HeldBlock(*place, tiers, block.scope, block.extra_key)
