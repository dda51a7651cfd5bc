"""A Mooncake pool as storage: every node of the pool can load the objects of every other node.

An object is one immutable value: a block's payload and a header behind it (`header.py`). The pool
belongs to all its nodes, and its master evicts objects, so this back end lists no keys and reports
none to indexes. An object that is not there is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.device.arena import Arena
from kvactors.errors import StoreError, StoreUnavailable
from kvactors.identity import StoreIdentity
from kvactors.native import addresses, object_names, slot_pointers
from kvactors.storage.backend import Expired, Keys, SlotViews, Views
from kvactors.storage.header import HEADER, outcome_of
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake_client import MooncakeClient
from kvactors.storage.shared import SharedStore

log = get_logger()

QUESTION_OBJECTS = 32
"""Objects in one question to the master, at most."""


# -- transfers


TRANSFER_BYTES, TRANSFER_OBJECTS = 64 << 20, 1024
"""Limits of a transfer. None can be cut short. A call costs about 0.4 ms of processor time beside
its bytes."""

LEAST_OBJECTS = 4
"""Objects of a transfer that may exceed the bytes."""


def transfers_of(count: int, block_bytes: int, most: int = TRANSFER_OBJECTS) -> Iterator[slice]:
    """The objects of each transfer of a batch, in equal parts."""
    step = min(most, max(LEAST_OBJECTS, TRANSFER_BYTES // block_bytes))
    calls = -(-count // step)
    return (slice(count * n // calls, count * (n + 1) // calls) for n in range(calls))


# -- the back end


RETRY = 0.2
"""Seconds until objects that found no space are tried once more: a burst outruns the master's
eviction."""


class PoolBatch(NamedTuple):
    """Some objects and their memory."""

    keys: Keys
    pointers: list[list[int]]  # addresses of each object's pieces
    sizes: list[int]  # bytes of the pieces of an object
    headers: NDArray[np.uint8] | None = None  # kept alive

    def chosen(self, which: Sequence[int]) -> PoolBatch:
        keys, pointers = [self.keys[i] for i in which], [self.pointers[i] for i in which]
        return self._replace(keys=keys, pointers=pointers)


class MooncakeBackend(SharedStore):
    """Objects of a pool. A thread of the client makes the headers of a transfer and moves it, or
    moves it and compares its headers."""

    slot_trailer_bytes = HEADER.size
    questions = (QUESTION_OBJECTS, QUESTION_OBJECTS)
    more_space = "Give the pool more memory (storage.mooncake.global_segment_size of its nodes)"

    def __init__(self, client: MooncakeClient, identity: StoreIdentity, block_bytes: int) -> None:
        checksums = client.config.payload_checksums
        super().__init__(identity.digest, block_bytes, checksums=checksums)
        self.client = client
        self.most_objects = TRANSFER_OBJECTS
        self._prefix = identity.pool_prefix

    async def open(self) -> None:
        await self.client.open()
        if not self.client.config.payload_checksums:
            log.warning("payload checksums are off", store="mooncake")
        if self.client.config.protocol == "tcp":
            log.info("pool over TCP", store="mooncake", rdma="storage.mooncake.protocol = 'rdma'")

    async def attach(self, arena: Arena) -> None:
        await self.client.register(arena)
        await super().attach(arena)

    async def close(self) -> None:
        """Leave the pool, which loses the objects in this node's memory."""
        await self.client.unregister()
        await self.client.close()

    def name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    # -- look-ups

    async def exists_many(self, keys: Keys, expired: Expired) -> list[bool]:
        """The leases of objects behind a missing one cost the pool little: they end after
        seconds."""
        found: list[bool] = []
        for start in range(0, len(keys), QUESTION_OBJECTS):
            if expired():
                break
            found += await self._has(keys[start : start + QUESTION_OBJECTS])
        return found + [False] * (len(keys) - len(found))

    async def _has(self, keys: Keys) -> list[bool]:
        """Whether the pool has each key. The master gives each object that it is asked about a
        lease."""
        codes = await self.client.exist([self.name(key) for key in keys])
        self.counters.outcomes[Outcome.UNAVAILABLE] += sum(code < 0 for code in codes)
        if max(codes) < 0:
            raise StoreUnavailable(f"the pool's master does not answer (code {codes[0]})")
        return [code == 1 for code in codes]

    # -- reads and writes

    async def get(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        outcomes, refused = await self._move(self._batch(keys, views), self._get, expired)
        self.counters.without_checksum += refused
        if refused:
            log.warning("objects without checksums", store="mooncake", objects=refused)
        return bytes(outcomes)

    async def put(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        """The pool reports an object that it has as written."""
        batch = self._batch(keys, views)
        outcomes, _ = await self._move(batch, self._put, expired)
        full = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.NO_SPACE]
        if full and not expired():
            await anyio.sleep(RETRY)
            again, _ = await self._move(batch.chosen(full), self._put, lambda: False)
            for i, outcome in zip(full, again, strict=True):
                outcomes[i] = outcome
        return bytes(outcomes)

    async def _move(
        self, batch: PoolBatch, transfer: Callable[..., tuple[bytes, int]], expired: Expired
    ) -> tuple[bytearray, int]:
        """Move a batch in transfers, of which none begins after the deadline. Returns the outcomes,
        and the number of objects refused because they have no checksum."""
        outcomes, without_checksum = bytearray([Outcome.LATE]) * len(batch.keys), 0
        for some in transfers_of(len(batch.keys), self.block_bytes, self.most_objects):
            if expired():
                break
            part = batch.chosen(range(len(batch.keys))[some])
            failed = bytes([Outcome.UNAVAILABLE]) * len(part.keys), 0
            outcomes[some], refused = await self.client.call(partial(transfer, part), failed)
            without_checksum += refused
        return outcomes, without_checksum

    def _get(self, batch: PoolBatch, store: Any) -> tuple[bytes, int]:
        """Read, and compare headers. In a thread of the client."""
        keys = b"".join(batch.keys)
        codes = self._codes(store.batch_get_into_multi_buffers, batch, keys)
        return self.headers.compare(keys, batch.pointers, codes)

    def _put(self, batch: PoolBatch, store: Any) -> tuple[bytes, int]:
        """Make headers, and write. In a thread of the client."""
        keys = b"".join(batch.keys)
        self.headers.make(keys, batch.pointers)
        codes = self._codes(store.batch_put_from_multi_buffers, batch, keys)
        return bytes(map(outcome_of, codes)), 0

    def _codes(self, call: Callable[..., Any], batch: PoolBatch, keys: bytes) -> list[int]:
        names = object_names(self._prefix, keys)
        codes = list(call(names, batch.pointers, [batch.sizes] * len(names)))
        if len(codes) != len(names):
            raise ValueError(f"{len(codes)} codes for {len(names)} objects")
        return codes

    # -- memory

    def _batch(self, keys: Keys, views: Views) -> PoolBatch:
        """Headers are behind the payloads if every payload is in a slot of the registered arena. A
        slot is then one piece: over a network, another piece costs as much as a small block, and a
        view of a slot costs as much as a small object."""
        arena, whole = self.arena, [self.block_bytes + HEADER.size]
        if isinstance(views, SlotViews) and self._has_slots(views):
            pointers = slot_pointers(views.arena.address, views.arena.stride, views.slots)
            return PoolBatch(keys, pointers, whole)
        payloads = addresses(list(views))
        if arena is not None and all(map(arena.holds, payloads)):
            return PoolBatch(keys, [[address] for address in payloads], whole)
        headers = np.zeros(HEADER.size * len(payloads), np.uint8)
        first = int(headers.ctypes.data)
        pieces = [[at, first + HEADER.size * i] for i, at in enumerate(payloads)]
        return PoolBatch(keys, pieces, [self.block_bytes, HEADER.size], headers)

    def _has_slots(self, views: SlotViews) -> bool:
        """Whether slots are those of the arena, and can be moved without views of them."""
        arena, slots = self.arena, views.slots
        return (
            arena is not None
            and arena is views.arena
            and len(slots) > 0
            and min(slots) >= 0
            and max(slots) < arena.num_slots
        )

    # -- removal

    async def remove(self, keys: Keys) -> None:
        await self.client.remove([self.name(key) for key in keys])

    async def remove_all(self) -> None:
        pattern = "^" + self._prefix
        if await self.client.call(lambda store: int(store.remove_by_regex(pattern, True)), -1) < 0:
            raise StoreError("the Mooncake pool did not remove the objects")
