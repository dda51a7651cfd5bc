"""Conversion of runs to the flush tasks that sinks receive."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.blocks import LedgerBlock, path_to
from kvactors.flush_notifier.messages import ExtraKeys, FlushTask
from kvactors.flush_notifier.runs import BlockRun
from kvactors.flush_notifier.steps import Steps, finish
from kvactors.types import Reason, Residency, Tier

HASH: Callable[[LedgerBlock], bytes] = attrgetter("hash")
TOKENS: Callable[[LedgerBlock], bytes] = attrgetter("tokens")

TIERS = {int(tier): tier for tier in Tier}
"""By bit: to make a tier of a number takes as long as the rest of a short task."""


class DeliveryBatch(NamedTuple):
    """One delivery: the tasks, and the runs behind them one for one.

    Attributes:
        cleared: not 0 if the only task removes everything: the view of every block numbered up to
            `cleared` goes.
    """

    tasks: list[FlushTask]
    runs: list[BlockRun]
    cleared: int = 0

    def __repr__(self) -> str:
        return discreet(self)

    def split(self, count: int) -> tuple[DeliveryBatch, DeliveryBatch]:
        """The first `count` tasks, and the others."""
        return DeliveryBatch(self.tasks[:count], self.runs[:count]), DeliveryBatch(
            self.tasks[count:], self.runs[count:], self.cleared
        )


def as_task(run: BlockRun, epoch: int, *, by_name: bool, step: int) -> Steps[FlushTask]:
    """Make the task of a run. by_name: without the path, see `Sink.by_name`."""
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
        TIERS[run.bit],
        run.reason,
        epoch,
        first.scope,
        extra_keys,
    )


def gathered(
    blocks: list[LedgerBlock], field: Callable[[LedgerBlock], bytes], step: int
) -> Steps[bytes]:
    """A field of all blocks as one buffer."""
    if len(blocks) <= step:
        return b"".join(map(field, blocks))
    whole = bytearray()
    for i in range(0, len(blocks), step):
        whole += b"".join(map(field, blocks[i : i + step]))
        yield
    return bytes(whole)


def extra_keys_of(blocks: list[LedgerBlock], step: int) -> Steps[ExtraKeys]:
    """(position, extra key) of the blocks that have one."""
    found: list[tuple[int, bytes]] = []
    for i in range(0, len(blocks), step):
        if i:
            yield
        found += [
            (block.depth - 1, block.extra_key) for block in blocks[i : i + step] if block.extra_key
        ]
    return tuple(found)


def clear_task(tiers: int, epoch: int) -> FlushTask:
    """The task that removes everything from every tier that a sink is sent."""
    return FlushTask(b"", 0, 0, b"", b"", Residency.GONE, Tier(tiers), Reason.CLEAR, epoch)


def path_tokens(block: LedgerBlock) -> bytes:
    """The complete token path from the root to a block."""
    path: list[LedgerBlock] = finish(path_to(block, block.depth))
    return b"".join(map(TOKENS, path))
