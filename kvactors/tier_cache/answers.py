"""Answers of a `TierCache`: look-ups, slots for stores, and events."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from kvactors.types import Reason, Tier


class Lookup(IntEnum):
    """The answer for one key.

    Attributes:
        MISS: neither the host tier nor storage has it.
        PENDING: its bytes are on their way into a host slot: ask again in a later step.
        HIT: its bytes are in a host slot, verified. They stay there until `TierCache.end_step`,
            and from `prepare_load` until `complete_load`.
    """

    MISS = 0
    PENDING = 1
    HIT = 2


class StoreSlots(NamedTuple):
    """The answer of `TierCache.prepare_store`.

    Attributes:
        keys: the keys to copy, in the order of the call. The others have a slot already.
        slots: one host slot for each of them.
        evicted: keys whose slots were taken for them, children before parents.
    """

    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    evicted: tuple[bytes, ...]


class TierEvent(NamedTuple):
    """A change of the keys in one tier, for the publisher of an engine.

    Attributes:
        tier: HOST or STORAGE.
        stored: whether the tier holds the keys now (True) or does not any more (False).
        keys: parents before children if stored, children before parents if not, as far as the
            parents are known.
        reason: why.
    """

    tier: Tier
    stored: bool
    keys: tuple[bytes, ...]
    reason: Reason
