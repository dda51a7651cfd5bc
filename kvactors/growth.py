"""The ends of a lease's block table: blocks reserved ahead of tokens, and tokens dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvactors.arguments import check_int
from kvactors.errors import NotReady
from kvactors.lease_hold import LeaseHold
from kvactors.prefix_index.messages import AcquireResult, Reserve, Truncate


class Growing(Protocol):
    """The parts of a `Lease` that its block table is changed by."""

    request_id: str
    num_tokens: int
    pending: bool
    _hold: LeaseHold
    _table: Sequence[int]
    _media: tuple[tuple[int, int], ...]

    def _append_blocks(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Add blocks to the end of the table."""


def covered_tokens(self: Growing) -> int:
    """Leading tokens that the block table has blocks for: all, except after an `acquire` with
    `chunk_tokens`."""
    return min(self.num_tokens, len(self._table) * self._hold.client.block_size)


async def next_chunk(  # noqa: D417  (a method of Lease)
    self: Growing, num_tokens: int, *, deadline: float | None = None
) -> tuple[int, ...]:
    """Take device blocks for the next tokens of a prompt that was acquired with `chunk_tokens`.

    Args:
        num_tokens: tokens after the first `covered_tokens` that the block table shall have place
            for. The rest of the lease's tokens if they are fewer.
        deadline: seconds from now.

    Returns:
        The device blocks added to the table.

    Raises:
        LeaseBusy: as in `extend`.
        NoRoom: as in `extend`.
    """
    at = self._hold.deadline(deadline)
    count = check_int("num_tokens", num_tokens, 1)
    upto = min(self.num_tokens, covered_tokens(self) + count)
    message = Reserve(self._hold.id, self.num_tokens, upto)
    granted: AcquireResult = await self._hold.grow("next_chunk", message, at)
    return self._append_blocks(granted.blocks)


async def reserve(  # noqa: D417  (a method of Lease)
    self: Growing, num_tokens: int, *, deadline: float | None = None
) -> tuple[int, ...]:
    """Take device blocks ahead of tokens, for speculation or asynchronous scheduling. A later
    `extend` uses them, and `truncate` gives them back.

    Args:
        num_tokens: tokens beyond those of the lease that the block table shall have place for.
            Blocks that were reserved before count. At most the tokens of one turn (131,072, or
            2,048 blocks if that is less).
        deadline: seconds from now.

    Returns:
        The device blocks added to the table.

    Raises:
        LeaseBusy: as in `extend`.
        NoRoom: as in `extend`.
    """
    at = self._hold.deadline(deadline)
    count = check_int("num_tokens", num_tokens, 0, self._hold.client.part_tokens)
    message = Reserve(self._hold.id, self.num_tokens, self.num_tokens + count)
    granted: AcquireResult = await self._hold.grow("reserve", message, at)
    return self._append_blocks(granted.blocks)


async def truncate(  # noqa: D417  (a method of Lease)
    self: Growing, num_tokens: int, *, deadline: float | None = None
) -> tuple[int, ...]:
    """Drop the tokens beyond the first `num_tokens`, such as rejected drafts, and the device
    blocks that only they or a `reserve` needed. `truncate(num_tokens)` with the lease's own
    number drops reserved blocks alone.

    Args:
        num_tokens: tokens to keep.
        deadline: seconds from now.

    Returns:
        The device blocks removed from the end of the table.

    Raises:
        TokensCommitted: some of the tokens are in committed blocks, which other requests may
            share, or the number is within a full block that a fork shares. Nothing changed.
        NotReady: loads are in flight. Nothing changed.
        LeaseBusy: as in `extend`, or a commit of this lease has not returned yet. Nothing
            changed.
        ValueError: the lease has fewer tokens, or a media item would be cut. Nothing changed.
    """
    hold = self._hold
    at = hold.deadline(deadline)
    kept = check_int("num_tokens", num_tokens, 0, self.num_tokens)
    for offset, length in self._media:
        if offset < kept < offset + length:
            raise ValueError(
                f"num_tokens is {kept}, within the media item of {length} tokens at {offset}"
            )
    if self.pending:
        raise NotReady(
            f"lease of {self.request_id!r} waits for loads: await wait_ready() before truncate()"
        )
    drops_blocks = len(self._table) * hold.client.block_size - kept >= hold.client.block_size
    message = Truncate(hold.id, self.num_tokens, kept)
    left = await hold.truncate(message, at, drops_blocks=drops_blocks)
    self.num_tokens = kept
    self._media = tuple(item for item in self._media if item[0] < kept)
    dropped = tuple(self._table[left:])
    if dropped:
        self._table = self._table[:left]
    return dropped
