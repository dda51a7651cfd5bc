"""Sizes in bytes, or in blocks and bytes: a number, or a text with a unit. k, M, G and T are powers
of 1024, with or without an i: "8 GB", "8 GiB" and "8g" are the same size."""

from __future__ import annotations

import re

from kvactors.errors import ConfigError
from kvactors.setting_types import MOST_BYTES, SIZE_PATTERN

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def in_bytes(size: int | str, name: str) -> int:
    """A size in bytes.

    Args:
        size: bytes, or a text such as "512 MiB".
        name: the setting, for the error.

    Raises:
        ConfigError: it is neither.
    """
    match = re.match(SIZE_PATTERN, size) if isinstance(size, str) else None
    found: float = -1
    if match is not None:
        found = float(match[1]) * UNITS[match[2].lower()]
    elif isinstance(size, int) and not isinstance(size, bool):
        found = size
    if found > MOST_BYTES:
        raise ConfigError(f"{name} must be at most {human(MOST_BYTES)}, not {size}")
    if found >= 0:
        return int(found)
    raise ConfigError(f"{name} must be a size in bytes, or such as 512MB, not {size!r}")


def in_blocks(size: int | str, name: str, block_bytes: int | None) -> int:
    """A size in blocks: a number is one of blocks, a text with a unit one of bytes.

    Args:
        size: blocks such as 4096 or "4096", or bytes such as "8 GiB".
        name: the setting, for the error.
        block_bytes: bytes of a block, None if not known.

    Raises:
        ConfigError: it is neither, holds no block, or is in bytes and `block_bytes` is None.
    """
    if isinstance(size, int) or (re.fullmatch(r"\s*-?[0-9]{1,18}\s*", size)):
        blocks = int(size)
        if blocks < 1:
            raise ConfigError(f"{name} must be at least one block, not {blocks}")
        return blocks
    found = in_bytes(size, name)
    if block_bytes is None:
        raise ConfigError(f"{name} {size!r} is in bytes, and the bytes of a block are not known")
    if found < block_bytes:
        raise ConfigError(f"{name} is {human(found)}, and one block takes {human(block_bytes)}")
    return found // block_bytes


def human(size: float) -> str:
    """A size as a text that `in_bytes` reads, with at most two decimals."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size:.0f} B"
