"""Runs: blocks in path order that change alike for a sink, and the order in which runs are sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.blocks import LAST, REASONS, LedgerBlock
from kvactors.flush_notifier.selection import Selection
from kvactors.flush_notifier.steps import Steps
from kvactors.types import Reason

MAX_RUN_BLOCKS = 32_768
"""Blocks in one task at most. A longer run is sent in parts."""

PATHS = 4
"""A batch of n blocks may carry paths of PATHS x n blocks in all: many short runs deep in the tree
are sent in several batches."""


class BlockRun(NamedTuple):
    """Blocks in path order, each the parent of the next, that change alike.

    Attributes:
        bit: the tier.
    """

    blocks: list[LedgerBlock]
    bit: int
    resident: bool
    reason: Reason

    def __repr__(self) -> str:
        return discreet(self)


def runs_of(
    selection: Selection, *, node: bool, max_blocks: int | None, step: int
) -> Steps[list[BlockRun]]:
    """The changes of a selection as runs, in the order in which they are sent.

    Args:
        selection: the differences of one sink.
        node: the sink is sent one fact for all tiers.
        max_blocks: the blocks of a batch, for a sink that is sent paths: only the first runs, whose
            paths are not much longer. None for a sink that is sent no paths.
        step: blocks processed in one step.
    """
    gains, losses = yield from selection.by_tier()
    runs: list[BlockRun] = []
    for bit, blocks in gains.items():
        runs += yield from join(
            blocks, bit, resident=True, reason_index=LAST if node else bit, step=step
        )
    # With losses on several tiers a run ends where the set of tiers changes or a branch begins, so
    # that depth alone orders the runs.
    alike = selection.losses if len(losses) > 1 else None
    for bit, blocks in losses.items():
        runs += yield from join(
            blocks, bit, resident=False, reason_index=LAST if node else bit, step=step, alike=alike
        )
    return ordered(runs) if max_blocks is None else list(within(ordered(runs), PATHS * max_blocks))


def join(
    blocks: Collection[LedgerBlock],
    bit: int,
    *,
    resident: bool,
    reason_index: int,
    step: int,
    alike: Mapping[LedgerBlock, int] | None = None,
) -> Steps[list[BlockRun]]:
    """Join blocks into runs. Linear in the number of blocks.

    A run follows the parent chain while the reason stays the same. It ends at a branch and at
    MAX_RUN_BLOCKS.

    Args:
        blocks: the blocks to join.
        bit: the tier.
        resident: whether the change is a gain.
        reason_index: index into `LedgerBlock.reasons`.
        step: blocks processed in one step.
        alike: further blocks, each with a value. A branch among them all ends a run, and so does
            another value.
    """
    if len(blocks) == 1:
        return [
            BlockRun([one], bit, resident, REASONS[one.reasons[reason_index]]) for one in blocks
        ]
    heir = yield from heirs(blocks if alike is None else alike, step)
    looked = 0
    runs: list[BlockRun] = []
    for block in blocks:
        looked += 1
        if not looked % step:
            yield
        number, parent = block.reasons[reason_index], block.parent
        if (
            parent is not None
            and heir.get(parent) is block
            and parent.reasons[reason_index] == number
            and (alike is None or alike[parent] == alike[block])
        ):
            continue  # part of its parent's run
        run, below = [block], heir.get(block)
        while (
            below is not None
            and below.reasons[reason_index] == number
            and (alike is None or alike[below] == alike[block])
        ):
            if len(run) == MAX_RUN_BLOCKS:
                runs.append(BlockRun(run, bit, resident, REASONS[number]))
                run = []
            run.append(below)
            below = heir.get(below)
            looked += 1
            if not looked % step:
                yield
        runs.append(BlockRun(run, bit, resident, REASONS[number]))
    return runs


def heirs(
    members: Collection[LedgerBlock], step: int
) -> Steps[dict[LedgerBlock, LedgerBlock | None]]:
    """By member that has children among the members: its only child there, None if there are
    several."""
    found: set[LedgerBlock] = set()
    looked = 0
    for block in members:
        found.add(block)
        looked += 1
        if not looked % step:
            yield
    heir: dict[LedgerBlock, LedgerBlock | None] = {}
    for block in members:
        parent = block.parent
        if parent is not None and parent in found:
            heir[parent] = None if parent in heir else block
        looked += 1
        if not looked % step:
            yield
    return heir


def ordered(runs: Iterable[BlockRun]) -> list[BlockRun]:
    """Gains first, the shallowest first, then losses, the deepest first. So a block that moves
    between tiers is on one of them in every view between."""
    return sorted(
        runs,
        key=lambda run: (
            not run.resident,
            run.blocks[0].depth if run.resident else -run.blocks[-1].depth,
        ),
    )


def within(runs: list[BlockRun], blocks: int) -> Iterator[BlockRun]:
    """The first runs (one at least) whose paths have `blocks` blocks in all."""
    for i, run in enumerate(runs):
        blocks -= run.blocks[-1].depth
        if i and blocks < 0:
            return
        yield run
