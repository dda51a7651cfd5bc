"""A rank's moves between its device and a store that accesses device memory itself."""

from __future__ import annotations

from kvactors.actor.log import get_logger
from kvactors.data_plane.ranks.protocol import Answer, CopyWithin, MoveDevice
from kvactors.device.base import DeviceBlocks
from kvactors.storage.backends.device_store import DeviceStore

log = get_logger()

NOT_MOVED, FAILED = 1, 2
"""Outcomes of a block that was not moved: it is not stored (or the store is full), or the store
failed."""


def cannot_be(message: MoveDevice, device: DeviceBlocks) -> str:
    """Why a move is impossible. Empty if it is possible."""
    block_bytes, blocks = 4 * device.layout.block_size, message.blocks
    if (
        min(blocks, default=0) < 0
        or max(blocks, default=-1) >= device.num_blocks
        or len(set(blocks)) < len(blocks)
    ):
        return (
            f"blocks {min(blocks)} to {max(blocks)}, {len(set(blocks))} different ones of "
            f"{device.num_blocks}"
        )
    if (
        message.start < 0
        or (message.start + len(blocks)) * block_bytes > len(message.tokens)
        or len(message.tokens) % block_bytes
    ):
        return (
            f"{len(blocks)} blocks from block {message.start} on, of a path of "
            f"{len(message.tokens)} bytes of tokens"
        )
    return ""


def cannot_copy(message: CopyWithin, device: DeviceBlocks) -> str:
    """Why copies within the device are impossible. Empty if they are possible."""
    sources, targets = message.sources, message.targets
    blocks = {*sources, *targets}
    if len(sources) != len(targets) or len(blocks) < len(set(sources)) + len(targets):
        return f"copies of blocks {sources} to {targets}, which overlap or have other lengths"
    if min(blocks, default=0) < 0 or max(blocks, default=-1) >= device.num_blocks:
        return f"blocks {min(blocks)} to {max(blocks)}, there are {device.num_blocks}"
    return ""


async def carried_out(direct: DeviceStore | None, message: MoveDevice, rank: int) -> Answer:
    """Make a move. The store does not access its blocks after this returns."""
    count, good, failed = len(message.blocks), 0, True
    if direct is not None:
        before = direct.unavailable
        move = direct.fetch if message.kind == "fetch" else direct.save
        try:
            good = await move(message.tokens, message.start, message.blocks, message.seconds)
            failed = direct.unavailable > before
        except Exception as error:
            log.error("device store failed", rank=rank, call=message.kind, error=repr(error))
    return Answer(
        message.op, bytes(good) + bytes([FAILED if failed else NOT_MOVED]) * (count - good)
    )
