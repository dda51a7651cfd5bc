"""Checks of an engine's arguments, in the thread that calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def checked_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Keys as a list.

    Raises:
        ValueError: one is no bytes, or empty.
    """
    found: list[Any] = list(keys)
    for key in found:
        if not isinstance(key, bytes) or not key:
            raise ValueError(f"a key must be bytes, and not empty: {key!r}")
    return found
