"""Hints of a caller about the reuse of a request's blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvactors.checks import check_flag, check_int, check_seconds, kind
from kvactors.types import MAX_PRIORITY, MIN_PRIORITY


class Hints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected reuse of a request's blocks. Hints change which blocks are
    evicted first, never what a request gets.

    Attributes:
        priority: of the request's blocks, -2 to 2. Within a tier, blocks of a lower priority are
            evicted first.
        ttl: seconds after the last use, after which the blocks are evicted before any other. None:
            no limit.
        pin: whether the blocks stay until `KVCache.unpin`, their ttl, or a clear.
        session_ends: whether no request is expected to continue this one.
        returns_in: expected seconds until a request continues this one. None: not known.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of its range, with its name.
    """

    priority: int = 0
    ttl: float | None = None
    pin: bool = False
    session_ends: bool = False
    returns_in: float | None = None

    def __post_init__(self) -> None:
        check_int("hints.priority", self.priority, MIN_PRIORITY, MAX_PRIORITY)
        if self.ttl is not None:
            check_seconds("hints.ttl", self.ttl)
        check_flag("hints.pin", self.pin)
        check_flag("hints.session_ends", self.session_ends)
        if self.returns_in is not None:
            check_seconds("hints.returns_in", self.returns_in)
        if self.session_ends and self.returns_in is not None:
            raise ValueError(
                "hints.returns_in is the time until the session's next request, and "
                "hints.session_ends is for a session without one: set one of them"
            )


class BlockHints(NamedTuple):
    """Salt and hints of the blocks of a message, one entry for each.

    Attributes:
        salts: see `kvactors.quotas.salt_id`.
        expiries: loop times from which the blocks are the first victims.
    """

    salts: tuple[int, ...]
    priorities: tuple[int, ...]
    expiries: tuple[float, ...]


def check_hints(hints: Any) -> Hints:
    """The hints of a call. TypeError for anything else."""
    if isinstance(hints, Hints):
        return hints
    raise TypeError(f"hints must be a kvactors.Hints, not {kind(hints)}")
