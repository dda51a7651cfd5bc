"""Checks of an engine's arguments, in the thread that calls."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

LONGEST = 1e9  # seconds of a wait at most: timers of threads and loops take no much larger numbers


def checked_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Keys as a list."""
    found = _listed("keys", "bytes", keys)
    for key in found:
        if not isinstance(key, bytes) or not key:
            raise ValueError(f"a key must be bytes, and not empty: {key!r:.80}")
    return found


def checked_key(key: Any) -> bytes:
    """A key.

    Raises:
        ValueError: it is no bytes, or empty. A view of memory is none: its bytes may change.
    """
    return checked_keys((key,))[0]


def checked_parents(
    parents: Iterable[bytes | None] | None, count: int
) -> list[bytes | None] | None:
    """The parents of `count` keys as a list, None if none is known."""
    if parents is None:
        return None
    found = _listed("parents", "bytes and None", parents, count)
    for parent in found:
        if not isinstance(parent, bytes | None):
            raise ValueError(f"a parent must be bytes or None: {parent!r:.80}")
    return found


def checked_views(views: Any, count: int) -> list[Any]:
    """The memory of `count` objects, as a list."""
    return _listed("views", "views", views, count)


def _listed(name: str, kind: str, values: Any, count: int | None = None) -> list[Any]:
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence of {kind}, not {values!r:.80}")
    found = list(values)
    if count not in (None, len(found)):
        raise ValueError(f"{len(found)} {name} of {count} keys")
    return found


def checked_flag(name: str, value: Any) -> bool:
    """A truth value, of numpy too."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise ValueError(f"{name} must be True or False, not {value!r:.80}")
    return bool(value)


def checked_limit(name: str, value: Any) -> float:
    """The seconds that a call may take. A time that has passed is 0."""
    try:
        seconds = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{name} must be a number of seconds, not {value!r:.80}")
    return min(max(seconds, 0.0), LONGEST)
