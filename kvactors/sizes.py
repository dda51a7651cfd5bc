"""Sizes in bytes: a number, or a text with a unit. k, M, G and T are powers of 1024, with or
without an i: "8 GB", "8 GiB" and "8g" are the same size."""

from __future__ import annotations

import re

from kvactors.errors import ConfigError
from kvactors.setting_types import SIZE_PATTERN

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
    if match is not None:
        return int(float(match[1]) * UNITS[match[2].lower()])
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    raise ConfigError(f"{name} must be a size in bytes, or such as 512MB, not {size!r}")


def human(size: float) -> str:
    """A size as a text that `in_bytes` reads, with at most two decimals."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size:.0f} B"
