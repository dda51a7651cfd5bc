"""Checks of a ledger in steps, between which it may change.

Each block is checked by itself. Counts over all blocks are compared at the end, if nothing has
changed since the beginning: on a system at rest that is always so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from kvactors.flush_notifier.blocks import UNSURE, LedgerBlock, accepts
from kvactors.flush_notifier.filter import SHIFT, SinkFilter
from kvactors.flush_notifier.steps import Steps
from kvactors.sharded import ShardedDict
from kvactors.types import ALL_TIERS, Tier

Tiers = Mapping[Tier, AbstractSet[bytes]]

TIERS, DEVICE = int(ALL_TIERS), int(Tier.DEVICE)

if TYPE_CHECKING:
    from kvactors.flush_notifier.ledger import Ledger


def check_steps(ledger: Ledger) -> Iterator[None]:
    """AssertionError if counts and differences do not match the blocks."""
    tree = ledger.tree
    version = tree.version
    children = ShardedDict[int]()
    blocks: list[LedgerBlock] = []
    dirty = [0] * len(ledger.sinks)
    idle, step = 0, step_of(ledger)
    for i, block in enumerate(tree.order, 1):
        _check_block(ledger, block)
        if version == tree.version:
            if block.parent is not None:
                above = block.parent.hash
                counts = children.of(above)
                counts[above] = counts.get(above, 0) + 1
            blocks.append(block)
            idle += block in tree.idle
            for view in ledger.sinks:
                dirty[view.index] += block in view.dirty
        if not i % step:
            yield
    yield from _check_counts(ledger, version, blocks, children)
    if version == tree.version:
        _require(len(blocks) == len(tree.blocks), "a block without a place in the order")
        _require(
            dirty == [view.pending for view in ledger.sinks],
            "a difference of a block that is not in the tree",
        )
        _require(idle == len(tree.idle), "an idle block that is not in the tree")
        _require(
            bool(tree.trimming or tree.settling) or idle <= tree.idle_limit,
            f"{idle} idle blocks, the limit is {tree.idle_limit}",
        )
    yield from children.free()
    while blocks:
        del blocks[-tree.step :]
        yield


def _check_counts(
    ledger: Ledger, version: int, blocks: list[LedgerBlock], children: ShardedDict[int]
) -> Iterator[None]:
    tree, unnamed, step = ledger.tree, ledger.unnamed, step_of(ledger)
    for i, (block_hash, tiers) in enumerate(_items(unnamed.tiers), 1):
        if version != tree.version:
            return
        _require(bool(tiers), "an unnamed block on no tier")
        _require(block_hash not in tree.blocks, "an unnamed block in the tree")
        fault = unnamed.fault(block_hash, tree) if block_hash in unnamed.unplaced else ""
        _require(not fault, fault)
        if not i % step:
            yield
    _require(len(unnamed.unplaced) <= len(unnamed.tiers), "an unplaced block that is not unnamed")
    for i, block in enumerate(blocks, 1):
        if version != tree.version:
            return
        counted = children.of(block.hash).get(block.hash, 0)
        _require(block.children == counted, "child counts disagree")
        if not i % step:
            yield


def step_of(ledger: Ledger) -> int:
    """Blocks that a check looks at in one step. Each costs several look-ups, which takes up to 20
    microseconds where none of them is in the processor's caches."""
    return max(1, ledger.tree.step // 16)


def _items(tiers: dict[bytes, int]) -> Iterator[tuple[bytes, int]]:
    """Items of a dict that may change between two of them, which ends the iteration."""
    items = iter(tiers.items())
    while True:
        try:
            yield next(items)
        except (StopIteration, RuntimeError):
            return


def _check_block(ledger: Ledger, block: LedgerBlock) -> None:
    tree = ledger.tree
    _require(tree.blocks.get(block.hash) is block, "a block under another hash")
    if block.parent is not None:
        _require(
            tree.blocks.get(block.parent.hash) is block.parent, "a block whose parent was removed"
        )
        _require(block.parent.children > 0, "a parent that does not count its child")
    _require(
        bool(block.children) or not block.idle() or block in tree.idle,
        "an idle block that is not among the idle ones",
    )
    for sink in ledger.sinks:
        view, due = block.views[sink.index], block.due[sink.index]
        if (due != view) != (block in sink.dirty) and not (block.pins and tree.settling):
            raise AssertionError("a difference that is not pending, or a pending one that is none")
        expected = ledger.due_of(block, sink)
        # A root is another one before the ledger is sent that (`Roots.renew`).
        leaving = block.parent is None and not expected
        if due != expected and not tree.spreading and not leaving:
            raise AssertionError("what is due of a block does not follow from the block above")
        if block.parent is not None and not tree.settling:
            below, above = view | view >> UNSURE, block.parent.views[sink.index]
            above |= above >> UNSURE
            if (below & TIERS and not above & TIERS) or below & ~above & DEVICE:
                raise AssertionError(
                    "a sink's view has a block without the block above it, see Ledger"
                )
        _require(
            block.token_addressed or not (view and sink.filter.by_tokens),
            "a sink addressed by tokens was sent a block that tokens do not identify",
        )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def divergence_steps(
    ledger: Ledger, sinks: Collection[int], mirrors: Mapping[int, Tiers], tiers: Tiers
) -> Steps[int]:
    """Count the blocks on which the view of one of the sinks and the tiers differ.

    A view should be the closed truth: each tier that holds a block, as far as the tree rule of
    `Ledger` allows. A change between two steps may or may not count: compare at rest.

    Args:
        ledger: the ledger.
        sinks: indices of the sinks.
        mirrors: by sink that keeps its own account of its view, that account. The ledger's account
            stands for the others.
        tiers: the blocks that each tier holds.
    """
    differing: set[bytes] = set()
    looked, step = 0, step_of(ledger)
    for sink in sinks:
        mirror, found, expected = mirrors.get(sink), 0, ShardedDict[int]()
        for block, due in due_of(ledger, ledger.sinks[sink].filter, tiers, expected):
            looked += 1
            if not looked % step:
                yield
            block_hash = block.hash
            held = block.views[sink] & TIERS if mirror is None else tiers_of(mirror, block_hash)
            found += held.bit_count()
            if due != held:
                differing.add(block_hash)
        if mirror is not None and found != sum(map(len, mirror.values())):
            for hashes in mirror.values():  # blocks that are not in the ledger
                for block_hash in list(hashes):
                    looked += 1
                    if not looked % step:
                        yield
                    if block_hash not in ledger.blocks:
                        differing.add(block_hash)
        yield from expected.free()
    return len(differing)


def due_of(
    ledger: Ledger, sink: SinkFilter, tiers: Tiers, expected: ShardedDict[int]
) -> Iterator[tuple[LedgerBlock, int]]:
    """Every block whose path is known, parents before children, and the tiers on which it would be
    announced to a sink with this filter if `tiers` held these blocks.

    Args:
        ledger: the ledger.
        sink: the sink's filter.
        tiers: the blocks that each tier holds.
        expected: empty. Filled with those tiers by block hash, for the caller to free in steps.
    """
    closed = sink.closed()
    for block in ledger.tree.order:
        above = (
            ledger.scopes.above_first(block)
            if block.parent is None
            else expected.of(block.parent.hash).get(block.parent.hash, 0)
        )
        held = tiers_of(tiers, block.hash)
        due = closed[above << SHIFT | held] if accepts(sink, block) else 0
        if due:
            expected.of(block.hash)[block.hash] = due
        yield block, due


def tiers_of(tiers: Tiers, block_hash: bytes) -> int:
    """The set of tiers that hold a block."""
    held = 0
    for tier, hashes in tiers.items():
        if block_hash in hashes:
            held |= tier
    return held
