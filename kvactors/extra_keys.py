"""Extra keys of blocks: the media items that take part in a block hash. `docs/keys.md` has the
encoding and test vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct

from kvactors.identity import field

MediaHash = bytes | str | int
"""The hash of a media item's content, as the caller names it."""

MediaItem = tuple[MediaHash, int]
"""A media item of a block: its hash, and the token at which it begins, counted from the block's
first token (negative if it began before)."""

TAG_BYTES, TAG_TEXT, TAG_INT = 4, 5, 6
HEAD = Struct("<BI")
OFFSET = Struct("<q")


def media_extra(items: Iterable[MediaItem]) -> bytes:
    """The extra key of a block from the media items that it overlaps, in order. Empty for none.
    Raises TypeError for a hash of another type."""
    encoded = b""
    for value, offset in items:
        if isinstance(value, bytes):
            tag, digest = TAG_BYTES, value
        elif isinstance(value, str):
            tag, digest = TAG_TEXT, value.encode()
        elif isinstance(value, int):
            tag, digest = TAG_INT, str(value).encode()
        else:
            raise TypeError(f"a media hash must be bytes, str or int, not {type(value).__name__}")
        encoded += field(tag, OFFSET.pack(offset) + digest)
    return encoded


def media_items(extra_key: bytes) -> list[MediaItem]:
    """The media items in a block's extra key: the inverse of `media_extra`. ValueError for bytes
    that are no such key."""
    items: list[MediaItem] = []
    position = 0
    while position < len(extra_key):
        start = position + HEAD.size
        if start > len(extra_key):
            raise ValueError(f"an extra key of {len(extra_key)} bytes ends within a field")
        tag, size = HEAD.unpack_from(extra_key, position)
        position = start + size
        digest = extra_key[start + OFFSET.size : position]
        if (
            position > len(extra_key)
            or size < OFFSET.size
            or tag not in (TAG_BYTES, TAG_TEXT, TAG_INT)
        ):
            raise ValueError(f"not an extra key: a field of tag {tag} and {size} bytes")
        value: MediaHash = (
            digest if tag == TAG_BYTES else digest.decode() if tag == TAG_TEXT else int(digest)
        )
        items.append((value, OFFSET.unpack_from(extra_key, start)[0]))
    return items


def leading_items(extra_key: bytes, num_tokens: int) -> bytes:
    """The extra key of a block of which only the first `num_tokens` tokens remain."""
    if not extra_key:
        return extra_key
    return media_extra(item for item in media_items(extra_key) if item[1] < num_tokens)


def block_extras(
    num_blocks: int,
    block_size: int,
    positions: Sequence[tuple[int, int]],
    hashes: Sequence[MediaHash],
    num_tokens: int | None = None,
) -> dict[int, bytes]:
    """Extra keys of blocks 0 .. num_blocks - 1 from media items at (offset, length) in tokens.

    An item belongs to every block that it overlaps. An item that ends exactly where a block starts
    does not belong to that block. Several items of a block count in item order. num_tokens: the
    prompt's length, which bounds the items. Raises ValueError for unequal lengths, empty or
    negative ranges, items that are not in ascending order or overlap, or reach beyond the prompt.
    """
    if len(positions) != len(hashes):
        raise ValueError(f"{len(positions)} media positions, {len(hashes)} hashes")
    end = 0
    for offset, length in positions:
        if offset < end or length < 1:
            raise ValueError(
                f"media item at {offset} of length {length}: items must be ascending, disjoint and "
                "not empty"
            )
        end = offset + length
    if num_tokens is not None and end > num_tokens:
        raise ValueError(f"a media item ends at {end}, beyond the prompt's {num_tokens} tokens")
    per_block: dict[int, list[MediaItem]] = {}
    for (offset, length), value in zip(positions, hashes, strict=True):
        for block in range(
            offset // block_size, min(num_blocks, (offset + length - 1) // block_size + 1)
        ):
            per_block.setdefault(block, []).append((value, offset - block * block_size))
    return {block: media_extra(items) for block, items in per_block.items()}
