"""Objects of a Mooncake pool: their names, and their moves in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.clock import clock_of
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.device.arena import Arena
from kvactors.native import addresses, object_names, slot_pointers
from kvactors.storage.backends.header import HEADER
from kvactors.storage.backends.mooncake_calls import CallSize
from kvactors.storage.backends.mooncake_client import MooncakeClient
from kvactors.storage.backends.mooncake_codes import OK, RPC_FAILED
from kvactors.storage.backends.mooncake_headers import Compared, PoolHeaders, outcome_of
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

RETRY = 0.2
"""Seconds until objects that found no space are tried once more: a burst outruns the master's
eviction."""


class Batch(NamedTuple):
    """Some objects and their memory.

    Attributes:
        keys: of the objects.
        places: of the objects, as `pointers` takes them.
        pointers: from places to the addresses of each object's pieces.
        sizes: bytes of the pieces of an object.
        headers: memory of the headers that are in no arena.
    """

    keys: Sequence[bytes]
    places: Sequence[Any]
    pointers: Callable[[Sequence[Any]], list[list[int]]]
    sizes: list[int]
    headers: NDArray[np.uint8] | None = None

    def part(self, some: slice) -> Batch:
        """Objects that follow one another."""
        return self._replace(keys=self.keys[some], places=self.places[some])

    def joined(self) -> bytes:
        """The keys, joined."""
        return b"".join(self.keys)

    def chosen(self, which: Sequence[int]) -> Batch:
        """Some of the objects, by position."""
        keys, places = [self.keys[i] for i in which], [self.places[i] for i in which]
        return self._replace(keys=keys, places=places)


class Moved(NamedTuple):
    """The result of a transfer.

    Attributes:
        codes: of the client, one a key.
        objects: that were moved whole.
        seconds: that the client took.
        compared: objects of a read, if they were compared in the same thread.
    """

    codes: list[int]
    objects: int = 0
    seconds: float = 0.0
    compared: Compared | None = None


class MooncakeObjects:
    """Reads and writes objects, each a block and its header.

    A thread of the client makes the headers of a transfer and moves it, or moves it and compares
    its headers. In a batch of several transfers the checksums are computed beside the transfer
    before or behind.

    Attributes:
        arena: memory that is registered with the client, None before there is any.
        calls: objects of each transfer.
        prefix: of the objects' names.

    Args:
        headers: of the objects.
        block_bytes: of an object.
    """

    def __init__(
        self,
        client: MooncakeClient,
        prefix: str,
        headers: PoolHeaders,
        block_bytes: int,
    ) -> None:
        self.arena: Arena | None = None
        self.calls = CallSize(block_bytes)
        self._without_checksum = 0
        self._client = client
        self.prefix = prefix
        self._headers = headers
        self._block_bytes = block_bytes
        # One thread for checksums beside a transfer, which would block the loop.
        self._checksums = Workers(1, "kvactors-mooncake-checksum")

    def name(self, key: bytes) -> str:
        """The name of an object in the pool."""
        return self.prefix + key.hex()

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]
    ) -> bytearray:
        """One outcome a key."""
        return await self._read(self._in_views(keys, views), expired)

    async def read_slots(
        self, keys: Sequence[bytes], slots: Sequence[int], expired: Callable[[], bool]
    ) -> bytearray:
        """`read` into slots of the arena (see `has_slots`)."""
        return await self._read(self._in_slots(keys, slots), expired)

    async def _read(self, batch: Batch, expired: Callable[[], bool]) -> bytearray:
        count = len(batch.keys)
        outcomes = bytearray([Outcome.LATE]) * count
        comparing: list[tuple[slice, asyncio.Future[Compared]]] = []
        try:
            for some in self.calls.parts(count):
                if expired():
                    break
                part = batch.part(some)
                alone = some.stop == count or not self._headers.checksums
                moved = await self._moved(part, partial(self._get, compare=alone))
                if moved.compared is not None:
                    self._settle(outcomes, some, moved.compared)
                    continue
                compare = partial(self._compare, part, moved.codes)
                comparing.append((some, asyncio.wrap_future(self._checksums.submit(compare))))
        finally:
            every = await wait_uncancelled(asyncio.gather(*(future for _, future in comparing)))
            for (some, _), compared in zip(comparing, every, strict=True):
                self._settle(outcomes, some, compared)
        return outcomes

    def _get(self, batch: Batch, clock: Callable[[], float], store: Any, *, compare: bool) -> Moved:
        """Read, and compare headers. In a thread of the client."""
        keys, pointers = batch.joined(), batch.pointers(batch.places)
        names, sizes = object_names(self.prefix, keys), [batch.sizes] * len(pointers)
        began = clock()
        codes = list(store.batch_get_into_multi_buffers(names, pointers, sizes))
        seconds, objects = clock() - began, codes.count(sum(batch.sizes))
        if not compare:
            return Moved(codes, objects, seconds)
        compared = self._headers.compare(keys, pointers, codes)
        return Moved(codes, objects, seconds, compared)

    def _compare(self, batch: Batch, codes: list[int]) -> Compared:
        return self._headers.compare(batch.joined(), batch.pointers(batch.places), codes)

    def _settle(self, outcomes: bytearray, some: slice, compared: Compared) -> None:
        outcomes[some] = compared.outcomes
        self._without_checksum += compared.without_checksum

    def take_without_checksum(self) -> int:
        """Objects read since the last call that were misses because they have no checksum."""
        taken, self._without_checksum = self._without_checksum, 0
        return taken

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]
    ) -> bytearray:
        """One outcome a key. The pool reports an object that it has as written."""
        return await self._write(self._in_views(keys, views), expired)

    async def write_slots(
        self, keys: Sequence[bytes], slots: Sequence[int], expired: Callable[[], bool]
    ) -> bytearray:
        """`write` from slots of the arena (see `has_slots`)."""
        return await self._write(self._in_slots(keys, slots), expired)

    async def _write(self, batch: Batch, expired: Callable[[], bool]) -> bytearray:
        outcomes = bytearray([Outcome.LATE]) * len(batch.keys)
        ahead: asyncio.Future[None] | None = None
        calls = list(self.calls.parts(len(batch.keys)))
        try:
            for some, then in zip(calls, [*calls[1:], None], strict=False):
                if expired():
                    break
                made = ahead is not None
                if ahead is not None:
                    await wait_uncancelled(ahead)
                moving = self._begin(batch.part(some), partial(self._put, made=made))
                beside = then if self._headers.checksums else None
                ahead = None if beside is None else self._ahead(batch.part(beside))
                outcomes[some] = self._written(await self._ended(moving))
                full = [i for i in range(some.start, some.stop) if outcomes[i] == Outcome.NO_SPACE]
                if full and not expired():
                    await anyio.sleep(RETRY)
                    moved = await self._moved(batch.chosen(full), partial(self._put, made=False))
                    again = self._written(moved)
                    for i, outcome in zip(full, again, strict=True):
                        outcomes[i] = outcome
        finally:
            if ahead is not None:
                await wait_uncancelled(ahead)  # it reads the payloads
        return outcomes

    def _put(self, batch: Batch, clock: Callable[[], float], store: Any, *, made: bool) -> Moved:
        """Make headers, and write. In a thread of the client."""
        keys, pointers = batch.joined(), batch.pointers(batch.places)
        names, sizes = object_names(self.prefix, keys), [batch.sizes] * len(pointers)
        if not made:
            self._headers.make(keys, pointers)
        began = clock()
        codes = list(store.batch_put_from_multi_buffers(names, pointers, sizes))
        return Moved(codes, codes.count(OK), clock() - began)

    def _ahead(self, batch: Batch) -> asyncio.Future[None]:
        """Make the headers of a later transfer."""

        def make() -> None:
            self._headers.make(batch.joined(), batch.pointers(batch.places))

        return asyncio.wrap_future(self._checksums.submit(make))

    @staticmethod
    def _written(moved: Moved) -> bytes:
        if moved.objects == len(moved.codes):
            return bytes([Outcome.OK]) * len(moved.codes)
        return bytes(map(outcome_of, moved.codes))

    def _begin(self, batch: Batch, transfer: Callable[..., Moved]) -> asyncio.Future[Moved]:
        count, clock = len(batch.keys), clock_of(asyncio.get_running_loop())

        def work(store: Any) -> Moved:
            moved = transfer(batch, clock, store)
            if len(moved.codes) != count:
                raise ValueError(f"{len(moved.codes)} codes for {count} objects")
            return moved

        return self._client.begin(work, Moved([RPC_FAILED] * count))

    async def _ended(self, moving: asyncio.Future[Moved]) -> Moved:
        moved = await wait_uncancelled(moving)
        self.calls.took(moved.objects, moved.seconds)
        return moved

    async def _moved(self, batch: Batch, transfer: Callable[..., Moved]) -> Moved:
        return await self._ended(self._begin(batch, transfer))

    def has_slots(self, arena: Arena, slots: Sequence[int], count: int) -> bool:
        """Whether these slots of the arena can be moved without views of them."""
        return (
            arena is self.arena
            and arena.trailer >= HEADER.size
            and arena.block_bytes == self._block_bytes
            and len(slots) == count > 0
            and min(slots) >= 0
            and max(slots) < arena.num_slots
        )

    def _in_slots(self, keys: Sequence[bytes], slots: Sequence[int]) -> Batch:
        """A slot of the arena is one piece with its trailer: over a network, another piece costs as
        much as a small block."""
        if self.arena is None:
            raise ValueError("no arena is attached")
        pointers = partial(slot_pointers, self.arena.address, self.arena.stride)
        return Batch(keys, slots, pointers, [self._block_bytes + HEADER.size])

    def _in_views(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> Batch:
        """Headers are behind the payloads if every payload is in a slot of the arena."""
        payloads, arena = addresses(list(views)), self.arena
        if arena is not None and arena.trailer >= HEADER.size and all(map(arena.holds, payloads)):
            whole = [[address] for address in payloads]
            return Batch(keys, whole, list, [self._block_bytes + HEADER.size])
        headers = np.zeros(HEADER.size * len(payloads), np.uint8)
        first = int(headers.ctypes.data)
        pieces = [[at, first + HEADER.size * i] for i, at in enumerate(payloads)]
        return Batch(keys, pieces, list, [self._block_bytes, HEADER.size], headers)

    def close(self) -> None:
        """End the thread of the checksums."""
        self._checksums.close()
