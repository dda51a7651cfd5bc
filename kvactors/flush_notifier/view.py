"""A sink's view: what it is sent at all, the acknowledged blocks, their difference from the due
state, and the next changes to send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvactors.actor.sliced import Sliced, pace
from kvactors.flush_notifier.blocks import UNSURE, HeldBlock, LedgerBlock, LedgerTree
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.select import DeliveryBatch, Selection, as_task
from kvactors.types import ALL_TIERS, Reason, Residency, Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.sinks.base import Sink

TIERS = int(ALL_TIERS)

SHIFT = 3  # bits of a set of tiers
ABOVE_ALL = int(ALL_TIERS)  # in place of the due state of the block above the first block of a path


class SinkFilter(NamedTuple):
    """The changes that one sink is sent. The ledger asks nothing else about a sink.

    Attributes:
        node: report one fact for all tiers, as Tier.DEVICE: resident while any of them holds the
            block.
        at_finish: gains are due when a request that covers the block finishes, losses immediately.
            Otherwise both are due immediately.
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
        """By the set of tiers that hold a block: the tiers on which to announce it, without regard
        to the block above."""
        sets = (tiers & self.tiers for tiers in range(ALL_TIERS + 1))
        return tuple(int(Tier.DEVICE) * bool(tiers) if self.node else tiers for tiers in sets)

    def closed(self) -> tuple[int, ...]:
        """The due state of a block, by the due state of the block above, shifted by SHIFT, and the
        set of tiers that hold the block.

        Nothing is due below a block of which nothing is due, and DEVICE only below DEVICE.
        """
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
        self.tree.begin()
        yield from self.tree.change_all(self._lose)
        yield from self.tree.end()

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
