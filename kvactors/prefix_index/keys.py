"""Extra keys of blocks: the media items that take part in a block hash. `docs/keys.md` has the encoding and test vectors."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors.identity import field

TAG_BYTES, TAG_TEXT, TAG_INT = 1, 2, 3


def media_extra(hashes: Sequence[bytes | str | int]) -> bytes:
    """The extra key of a block from the hashes of the media it overlaps, in item order; empty for none. TypeError for other types."""
    encoded = b""
    for value in hashes:
        if isinstance(value, bytes):
            encoded += field(TAG_BYTES, value)
        elif isinstance(value, str):
            encoded += field(TAG_TEXT, value.encode())
        elif isinstance(value, int):
            encoded += field(TAG_INT, str(value).encode())
        else:
            raise TypeError(f"a media hash must be bytes, str or int, not {type(value).__name__}")
    return encoded


def block_extras(
    num_blocks: int,
    block_size: int,
    positions: Sequence[tuple[int, int]],
    hashes: Sequence[bytes | str | int],
    num_tokens: int | None = None,
) -> dict[int, bytes]:
    """Extra keys of blocks 0 .. num_blocks - 1 from media items at (offset, length) in tokens.

    An item belongs to every block it overlaps, an item that ends exactly where a block starts does not; several items of a block
    count in item order. num_tokens: the prompt's length; items must lie within it. ValueError for unequal lengths, empty or
    negative ranges, items that are not in ascending order or overlap, or reach beyond the prompt.
    """
    if len(positions) != len(hashes):
        raise ValueError(f"{len(positions)} media positions, {len(hashes)} hashes")
    end = 0
    for offset, length in positions:
        if offset < end or length < 1:
            raise ValueError(f"media item at {offset} of length {length}: items must be ascending, disjoint and not empty")
        end = offset + length
    if num_tokens is not None and end > num_tokens:
        raise ValueError(f"a media item ends at {end}, beyond the prompt's {num_tokens} tokens")
    per_block: dict[int, list[bytes | str | int]] = {}
    for (offset, length), value in zip(positions, hashes, strict=True):
        for block in range(offset // block_size, min(num_blocks, (offset + length - 1) // block_size + 1)):
            per_block.setdefault(block, []).append(value)
    return {block: media_extra(values) for block, values in per_block.items()}
