"""How pieces are copied: by the copy engines, by a kernel, or gathered first, and from which sizes
on. The sizes follow from timings on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BATCH_FROM = 32 << 10
"""Bytes of a piece from which on it goes by the copy engines, unless measured otherwise."""

STAGE_FROM = 256 << 10
"""Bytes of an operation's small pieces from which on they are gathered, unless measured
otherwise."""

MERGE_FROM = 4
"""Blocks of a run from which on a piece of it is one copy, unless measured otherwise."""

NEVER = 1 << 62
LONGEST = 10.0
"""Seconds. A longer timing is impossible."""


class Choice(NamedTuple):
    """How pieces go.

    Attributes:
        batch_from: bytes of a piece from which on it goes by the copy engines.
        stage_from: bytes of the small pieces of an operation, or of a group of its layers, from
            which on they are gathered on the device.
        merge_from: neighbouring blocks from which on a piece of theirs is one copy.
    """

    batch_from: int = BATCH_FROM
    stage_from: int = STAGE_FROM
    merge_from: int = MERGE_FROM


class Timing(NamedTuple):
    """A measurement of 64 pieces there and back, the best of several.

    Attributes:
        piece: bytes of a piece.
        batch: seconds by the copy engines.
        kernel: seconds by a kernel that reads and writes the host's memory.
        gathered: seconds by a kernel and one copy, 0 if the buffer is too small.
    """

    piece: int
    batch: float
    kernel: float
    gathered: float = 0.0


class RunTiming(NamedTuple):
    """A measurement of a piece of neighbouring blocks there and back, the best of several.

    Attributes:
        blocks: how many.
        batch: seconds with a copy for each.
        rectangle: seconds with one copy for all.
    """

    blocks: int
    batch: float
    rectangle: float


def choose(timings: Sequence[Timing], runs: Sequence[RunTiming], pieces: int) -> Choice:
    """The choice that follows from timings.

    Args:
        timings: by ascending size.
        runs: by ascending length.
        pieces: pieces of one timing.
    """
    kernels = [min(one.kernel, one.gathered or one.kernel) for one in timings]
    sizes = [one.piece for one in timings]
    batches = [one.batch for one in timings]
    gathered = [one for one in timings if one.gathered]
    return Choice(
        first_not_slower(
            sizes, batches, kernels, BATCH_FROM, beyond=2 * sizes[-1] if sizes else BATCH_FROM
        ),
        first_not_slower(
            [pieces * one.piece for one in gathered],
            [one.gathered for one in gathered],
            [one.kernel for one in gathered],
            STAGE_FROM,
        ),
        first_not_slower(
            [one.blocks for one in runs],
            [one.rectangle for one in runs],
            [one.batch for one in runs],
            MERGE_FROM,
        ),
    )


def first_not_slower(
    sizes: Sequence[int],
    seconds: Sequence[float],
    others: Sequence[float],
    otherwise: int,
    *,
    beyond: int = NEVER,
) -> int:
    """The smallest size from which on one way is never slower than the other one.

    Args:
        sizes: ascending.
        seconds: of the way, by size.
        others: of the other way.
        otherwise: the answer without timings, or if one is impossible.
        beyond: the answer if the way is slower at the largest size.
    """
    if not sizes or not all(0 < one < LONGEST for one in (*seconds, *others)):
        return otherwise
    best = beyond
    for size, one, other in zip(reversed(sizes), reversed(seconds), reversed(others), strict=True):
        if one > other:
            break
        best = size
    return best
