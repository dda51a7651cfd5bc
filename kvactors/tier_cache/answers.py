"""Answers of a `TierCache`: look-ups, slots for stores, and events."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

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
        keys: the keys to copy, in the order of the call. Keys in no field have a slot already.
        evicted: keys whose slots were taken for them, children before parents.
        waiting: keys for which no slot is free now, in the order of the call. Keep their device
            blocks and ask again after `end_step`.
        refused: keys that do not wait: no store has got a slot for `storage.on_full_wait_s`, or the
            key has waited for `storage.timeout_s`.
    """

    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    evicted: tuple[bytes, ...]
    waiting: tuple[bytes, ...] = ()
    refused: tuple[bytes, ...] = ()


class CopiesInFlight(NamedTuple):
    """Copies of the engine that were begun and not completed.

    Attributes:
        loads: keys that `TierCache.complete_load` is due for, each as often as it was prepared.
    """

    stores: tuple[bytes, ...]
    loads: tuple[bytes, ...]


class TierEvent(NamedTuple):
    """A change of the keys in one tier, for the publisher of an engine.

    Attributes:
        keys: parents before children if stored, else children first, as far as parents are known.
    """

    tier: Tier
    stored: bool
    keys: tuple[bytes, ...]
    reason: Reason


class TierStatistics(NamedTuple):
    """Counters since the start, and sizes of this moment.

    Attributes:
        host_hits: keys loaded that an engine had stored on the host, or loaded before.
        storage_hits: keys loaded for the first time after they came from storage.
        stored: keys copied from the device to the host.
        failed_stores: failed copies to the host.
        evicted: keys that left the host tier for others.
        refused_stores: keys not stored on the host: no slot was free for too long.
        unsaved: evicted keys that were to be saved, and not in storage.
        fetched: keys from storage, verified.
        failed_fetches: keys that storage did not return: corrupt, missing, late, no answer.
        refused_fetches: stored keys that were misses: no host slot was free for too long.
        saved: keys written to storage, or found there.
        failed_saves: keys not taken by storage.
        fetched_bytes: bytes read from storage.
        saved_bytes: bytes written to storage.
        slots: host slots.
        resident: keys with a host slot.
        pinned: host slots in use by a transfer.
        stored_objects: objects in storage.
    """

    host_hits: int
    storage_hits: int
    stored: int
    failed_stores: int
    evicted: int
    refused_stores: int
    unsaved: int
    fetched: int
    failed_fetches: int
    refused_fetches: int
    saved: int
    failed_saves: int
    fetched_bytes: int
    saved_bytes: int
    slots: int
    resident: int
    pinned: int
    stored_objects: int


class TierHealth(NamedTuple):
    """Whether every tier works.

    Attributes:
        status: `ok`, `degraded` (the cache works without the parts in `reasons`) or `closed`.
        reasons: why the status is `degraded`.
    """

    status: Literal["ok", "degraded", "closed"]
    reasons: tuple[str, ...]
