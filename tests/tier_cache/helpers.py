"""Tier caches over small slots, with bytes that tell their key."""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvactors import TierCache, open_tiers
from kvactors.tier_cache import Lookup, SlotMemory, StorageTier, open_storage
from kvactors.tier_cache.settings import checked_config

BLOCK = 96
LIMIT = 30.0
"""Seconds that a wait may take. It only bounds a hang."""

KEYS = [bytes([i]) * 36 for i in range(256)]


def payload(key: bytes, size: int = BLOCK) -> bytes:
    """The bytes of a key's block."""
    return (hashlib.sha256(key).digest() * (size // 32 + 1))[:size]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(
    num_slots: int = 4, *, memory: Any = None, clock: Clock | None = None, **settings: Any
) -> TierCache:
    table = {"model": "m", "block_bytes": BLOCK, "num_slots": num_slots, **settings}
    if clock is not None:
        return TierCache(checked_config(table), SlotMemory(num_slots, BLOCK, memory), clock=clock)
    return open_tiers(table, memory=memory)


def on_disk(folder: Any, num_slots: int = 4, **storage: Any) -> TierCache:
    table = {"backend": "file", "directory": str(folder), "free_space_floor": 0, "timeout_s": 20.0}
    return make(
        num_slots, events=["host", "storage"], storage={**table, "capacity_blocks": 64, **storage}
    )


def alone(**storage: Any) -> StorageTier:
    """A storage tier by itself, of blocks like those of the caches."""
    return open_storage({"model": "m", "block_bytes": BLOCK, "num_slots": 1, "storage": storage})


def elsewhere(call: Callable[..., object], *arguments: Any) -> object:
    """What a call in another thread returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments).result(LIMIT)


def in_child(call: Callable[[], object]) -> bool:
    """Whether a call in a forked child returns, and the child ends."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def store(
    cache: TierCache, keys: Sequence[bytes], parents: Sequence[bytes | None] | None = None
) -> bool:
    """Store keys with their payloads. Returns whether there were slots for all of them."""
    found = cache.prepare_store(keys, parents)
    for key, slot in zip(found.keys, found.slots, strict=True):
        cache.memory.view(slot)[:] = payload(key, cache.config.block_bytes)
    cache.complete_store(found.keys)
    return not (found.waiting or found.refused)


def settle(cache: TierCache) -> None:
    """End steps until nothing is in flight."""
    until = time.monotonic() + LIMIT
    cache.end_step()
    while cache.has_pending_work():
        assert time.monotonic() < until, "fetches and saves do not end"
        time.sleep(0.001)
        cache.end_step()


def answer(cache: TierCache, key: bytes) -> Lookup:
    """Look a key up until it is not pending."""
    until = time.monotonic() + LIMIT
    while (found := cache.lookup(key)) is Lookup.PENDING:
        assert time.monotonic() < until, "a look-up is pending without end"
        cache.end_step()
        time.sleep(0.001)
    return found


def load(cache: TierCache, key: bytes) -> bytes:
    """The bytes of a key that was answered HIT."""
    (slot,) = cache.prepare_load([key])
    found = bytes(cache.memory.view(slot))
    cache.complete_load([key])
    return found
