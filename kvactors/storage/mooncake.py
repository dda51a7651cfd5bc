"""A Mooncake pool as storage: every node of the pool can load the objects of every other node.

An object is one immutable value: a block's payload and a header behind it. The pool belongs to
all its nodes, and its master evicts objects, so this back end lists no keys and reports none to
indexes. An object that is not there is a miss.

The header is compared on every read (`native.make_headers`). Little-endian: magic "KVACTORS",
version u32, kind u32, digest 32 bytes, key 32 bytes, payload length u64, XXH3-64 of the payload
u64: together 96 bytes. An object without a checksum has kind 1, and 0 in the place of the checksum.
Others have kind 0.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.clock import clock_of
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.device.arena import Arena
from kvactors.errors import StoreError, StoreUnavailable
from kvactors.identity import Lineage, StoreIdentity
from kvactors.native import addresses, check_headers, make_headers, object_names, slot_pointers
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.storage.backend import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake_client import (
    NO_SPACE,
    NOT_FOUND,
    NOT_READY,
    OK,
    RPC_FAILED,
    MooncakeClient,
)
from kvactors.threads import Workers

MAGIC = b"KVACTORS"
VERSION = 1
HEADER = struct.Struct("<8sII32s32sQQ")


class Fit(IntEnum):
    """How a header compares with its object (`native.check_headers`)."""

    DIFFERS = 0
    FITS = 1
    NO_CHECKSUM = 2  # everything else fits


log = get_logger()

QUESTION_OBJECTS = 32
"""Objects in one question to the master, at most."""


# -- headers


class Compared(NamedTuple):
    """Objects of a read that were compared with their headers."""

    outcomes: bytes
    without_checksum: int = 0


class PoolHeaders:
    """Makes and compares headers. Its calls may run in any thread.

    Args:
        checksums: whether headers have a checksum of the payload. With it, an object without one
            is a miss. Without it, no checksum is compared.
    """

    def __init__(self, digest: bytes, block_bytes: int, checksums: bool) -> None:
        self.checksums = checksums
        self._digest = digest
        self._block_bytes = block_bytes
        self._whole = block_bytes + HEADER.size
        without = Outcome.MISS if checksums else Outcome.OK
        self._outcome_of_fit = bytes.maketrans(
            bytes([Fit.DIFFERS, Fit.FITS, Fit.NO_CHECKSUM]),
            bytes([Outcome.CORRUPT, Outcome.OK, without]),
        )

    def make(self, keys: bytes, pointers: list[list[int]]) -> None:
        make_headers(self._digest, keys, pointers, self._block_bytes, self.checksums)

    def compare(self, keys: bytes, pointers: list[list[int]], codes: list[int]) -> Compared:
        """Compare the objects that arrived, by the codes of the client. `keys` are joined."""
        if codes.count(self._whole) == len(codes) == len(pointers):
            fits = self._fits(keys, pointers)
            return Compared(fits.translate(self._outcome_of_fit), self._refused(fits))
        arrived = [i for i, code in enumerate(codes) if code == self._whole]
        some = b"".join(keys[32 * i : 32 * i + 32] for i in arrived)
        fits = self._fits(some, [pointers[i] for i in arrived])
        outcomes = bytearray(Outcome.CORRUPT if code >= 0 else outcome_of(code) for code in codes)
        for i, fit in zip(arrived, fits, strict=True):
            outcomes[i] = self._outcome_of_fit[fit]
        return Compared(bytes(outcomes), self._refused(fits))

    def _fits(self, keys: bytes, pointers: list[list[int]]) -> bytes:
        return check_headers(self._digest, keys, pointers, self._block_bytes, self.checksums)

    def _refused(self, fits: bytes) -> int:
        return fits.count(Fit.NO_CHECKSUM) if self.checksums else 0


def outcome_of(code: int) -> Outcome:
    """The outcome that a return code of the client stands for."""
    if code >= OK:
        return Outcome.OK
    return {NO_SPACE: Outcome.NO_SPACE, NOT_FOUND: Outcome.MISS, NOT_READY: Outcome.MISS}.get(
        code, Outcome.UNAVAILABLE
    )


# -- the size of a transfer


CALL_SECONDS = 0.1
"""Time that a transfer may take. None can be cut short. A call costs about 0.4 ms of processor time
beside its bytes, and its first and last objects leave cores idle, so longer transfers cost less."""

LEAST_BYTES, MOST_BYTES = 16 << 20, 64 << 20
LEAST_OBJECTS, MOST_OBJECTS = 4, 1024
"""Limits of a transfer. A transfer with the least objects may exceed the limits of bytes."""

COUNTED_BYTES = 4 << 20
"""Bytes of a transfer from which the rate is estimated, at least."""

WEIGHT = 0.25
"""Of the last transfer in the rate."""


class CallSize:
    """Chooses the number of objects of a transfer from the rate of earlier ones."""

    def __init__(self, block_bytes: int) -> None:
        self.most_objects = MOST_OBJECTS
        self._block_bytes = block_bytes
        self._rate = 0.0  # bytes a second

    def parts(self, count: int) -> Iterator[slice]:
        """The objects of each transfer of a batch, in equal parts."""
        size = int(max(LEAST_BYTES, min(MOST_BYTES, self._rate * CALL_SECONDS)))
        step = min(self.most_objects, max(LEAST_OBJECTS, size // self._block_bytes))
        calls = -(-count // step)
        start = 0
        for left in range(calls, 0, -1):
            end = start + -((start - count) // left)
            yield slice(start, end)
            start = end

    def record(self, objects: int, seconds: float) -> None:
        moved = objects * self._block_bytes
        if moved >= COUNTED_BYTES and seconds > 0:
            rate = moved / seconds
            self._rate += (WEIGHT if self._rate else 1.0) * (rate - self._rate)


# -- the back end


RETRY = 0.2
"""Seconds until objects that found no space are tried once more: a burst outruns the master's
eviction."""


class PoolBatch(NamedTuple):
    """Some objects and their memory."""

    keys: Sequence[bytes]
    pointers: list[list[int]]  # addresses of each object's pieces
    sizes: list[int]  # bytes of the pieces of an object
    headers: NDArray[np.uint8] | None = None  # kept alive

    def part(self, some: slice) -> PoolBatch:
        return self._replace(keys=self.keys[some], pointers=self.pointers[some])

    def joined(self) -> bytes:
        return b"".join(self.keys)

    def chosen(self, which: Sequence[int]) -> PoolBatch:
        keys, pointers = [self.keys[i] for i in which], [self.pointers[i] for i in which]
        return self._replace(keys=keys, pointers=pointers)


class PoolMoved(NamedTuple):
    """The result of a transfer."""

    codes: list[int]
    objects: int = 0
    seconds: float = 0.0
    compared: Compared | None = None


class MooncakeBackend(Backend):
    """A client of a pool.

    A thread of the client makes the headers of a transfer and moves it, or moves it and compares
    its headers. In a batch of several transfers the checksums are computed beside the transfer
    before or behind."""

    slot_trailer_bytes = HEADER.size

    def __init__(self, config: MooncakeConfig, identity: StoreIdentity, block_bytes: int) -> None:
        super().__init__(identity.digest, block_bytes)
        self.client = MooncakeClient(config, identity.rank)
        self.calls = CallSize(block_bytes)
        self.arena: Arena | None = None  # registered with the client
        self._prefix = identity.pool_prefix
        self._headers = PoolHeaders(identity.digest, block_bytes, config.payload_checksums)
        # One thread for checksums beside a transfer, which would block the loop.
        self._checksums = Workers(1, "kvactors-mooncake-checksum")

    async def open(self) -> None:
        await self.client.open()
        if not self.client.config.payload_checksums:
            log.warning("payload checksums are off", store="mooncake")
        if self.client.config.protocol == "tcp":
            log.info("pool over TCP", store="mooncake", rdma="storage.mooncake.protocol = 'rdma'")

    async def attach(self, arena: Arena) -> None:
        await self.client.register(arena)
        self.arena = arena

    async def close(self) -> None:
        """Leave the pool, which loses the objects in this node's memory."""
        await self.client.unregister()
        await self.client.close()
        self._checksums.close()

    def name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    # -- look-ups

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """None: only the master can answer."""
        return None

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """The master is not asked about a key behind a missing one."""
        run = 0
        for start in range(0, len(keys), QUESTION_OBJECTS):
            if expired():
                return run
            found = await self._has(keys[start : start + QUESTION_OBJECTS])
            if False in found:
                return run + found.index(False)
            run += len(found)
        return run

    async def exists_many(self, keys: Sequence[bytes], expired: Expired) -> list[bool]:
        """The leases of objects behind a missing one cost the pool little: they end after
        seconds."""
        found: list[bool] = []
        for start in range(0, len(keys), QUESTION_OBJECTS):
            if expired():
                break
            found += await self._has(keys[start : start + QUESTION_OBJECTS])
        return found + [False] * (len(keys) - len(found))

    async def _has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the pool has each key. The master gives each object that it is asked about a
        lease."""
        codes = await self.client.exist([self.name(key) for key in keys])
        self.counters.outcomes[Outcome.UNAVAILABLE] += sum(code < 0 for code in codes)
        if max(codes) < 0:
            raise StoreUnavailable(f"the pool's master does not answer (code {codes[0]})")
        return [code == 1 for code in codes]

    # -- reads

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        return await self._read(self._in_views(keys, views), expired)

    async def read_slots(
        self, keys: Sequence[bytes], arena: Arena, slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """Views of slots would cost as much as small objects."""
        if not self._has_slots(arena, slots, len(keys)):
            return await super().read_slots(keys, arena, slots, expired)
        return await self._read(self._in_slots(keys, arena, slots), expired)

    async def _read(self, batch: PoolBatch, expired: Expired) -> ReadReport:
        """Corrupt objects are removed from the pool."""
        count = len(batch.keys)
        outcomes = bytearray([Outcome.LATE]) * count
        compared: list[tuple[slice, Compared]] = []
        comparing: list[tuple[slice, asyncio.Future[Compared]]] = []
        try:
            for some in self.calls.parts(count):
                if expired():
                    break
                part = batch.part(some)
                alone = some.stop == count or not self._headers.checksums
                moved = await self._moved(part, partial(self._get, compare=alone))
                if moved.compared is not None:
                    compared.append((some, moved.compared))
                    continue
                compare = partial(self._compare, part, moved.codes)
                comparing.append((some, asyncio.wrap_future(self._checksums.submit(compare))))
        finally:
            every = await wait_uncancelled(asyncio.gather(*(future for _, future in comparing)))
        compared += zip((some for some, _ in comparing), every, strict=True)
        for some, found in compared:
            outcomes[some] = found.outcomes
        if refused := sum(found.without_checksum for _, found in compared):
            self.counters.without_checksum += refused
            log.warning("objects without checksums", store="mooncake", objects=refused)
        results = zip(batch.keys, outcomes, strict=True)
        await self.remove([key for key, outcome in results if outcome == Outcome.CORRUPT])
        return ReadReport(bytes(outcomes), [])

    def _get(
        self, batch: PoolBatch, clock: Callable[[], float], store: Any, *, compare: bool
    ) -> PoolMoved:
        """Read, and compare headers. In a thread of the client."""
        keys, pointers = batch.joined(), batch.pointers
        names, sizes = object_names(self._prefix, keys), [batch.sizes] * len(pointers)
        began = clock()
        codes = list(store.batch_get_into_multi_buffers(names, pointers, sizes))
        seconds, objects = clock() - began, codes.count(sum(batch.sizes))
        compared = self._headers.compare(keys, pointers, codes) if compare else None
        return PoolMoved(codes, objects, seconds, compared)

    def _compare(self, batch: PoolBatch, codes: list[int]) -> Compared:
        return self._headers.compare(batch.joined(), batch.pointers, codes)

    # -- writes: the pool reports an object that it has as written

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        return await self._write(self._in_views(keys, views), expired)

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Arena,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        if not self._has_slots(arena, slots, len(keys)):
            return await super().write_slots(keys, arena, slots, expired)
        return await self._write(self._in_slots(keys, arena, slots), expired)

    async def _write(self, batch: PoolBatch, expired: Expired) -> WriteReport:
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
        return WriteReport(bytes(outcomes), [])

    def _put(
        self, batch: PoolBatch, clock: Callable[[], float], store: Any, *, made: bool
    ) -> PoolMoved:
        """Make headers, and write. In a thread of the client."""
        keys, pointers = batch.joined(), batch.pointers
        names, sizes = object_names(self._prefix, keys), [batch.sizes] * len(pointers)
        if not made:
            self._headers.make(keys, pointers)
        began = clock()
        codes = list(store.batch_put_from_multi_buffers(names, pointers, sizes))
        return PoolMoved(codes, codes.count(OK), clock() - began)

    def _ahead(self, batch: PoolBatch) -> asyncio.Future[None]:

        def make() -> None:
            self._headers.make(batch.joined(), batch.pointers)

        return asyncio.wrap_future(self._checksums.submit(make))

    @staticmethod
    def _written(moved: PoolMoved) -> bytes:
        if moved.objects == len(moved.codes):
            return bytes([Outcome.OK]) * len(moved.codes)
        return bytes(map(outcome_of, moved.codes))

    def _begin(
        self, batch: PoolBatch, transfer: Callable[..., PoolMoved]
    ) -> asyncio.Future[PoolMoved]:
        count, clock = len(batch.keys), clock_of(asyncio.get_running_loop())

        def work(store: Any) -> PoolMoved:
            moved = transfer(batch, clock, store)
            if len(moved.codes) != count:
                raise ValueError(f"{len(moved.codes)} codes for {count} objects")
            return moved

        return self.client.begin(work, PoolMoved([RPC_FAILED] * count))

    async def _ended(self, moving: asyncio.Future[PoolMoved]) -> PoolMoved:
        moved = await wait_uncancelled(moving)
        self.calls.record(moved.objects, moved.seconds)
        return moved

    async def _moved(self, batch: PoolBatch, transfer: Callable[..., PoolMoved]) -> PoolMoved:
        return await self._ended(self._begin(batch, transfer))

    # -- memory

    def _has_slots(self, arena: Arena, slots: Sequence[int], count: int) -> bool:
        """Whether these slots of the arena can be moved without views of them."""
        return (
            arena is self.arena
            and arena.trailer >= HEADER.size
            and arena.block_bytes == self.block_bytes
            and len(slots) == count > 0
            and min(slots) >= 0
            and max(slots) < arena.num_slots
        )

    def _in_slots(self, keys: Sequence[bytes], arena: Arena, slots: Sequence[int]) -> PoolBatch:
        """A slot of the arena is one piece with its trailer: over a network, another piece costs as
        much as a small block."""
        pointers = slot_pointers(arena.address, arena.stride, slots)
        return PoolBatch(keys, pointers, [self.block_bytes + HEADER.size])

    def _in_views(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> PoolBatch:
        """Headers are behind the payloads if every payload is in a slot of the arena."""
        payloads, arena = addresses(list(views)), self.arena
        if arena is not None and arena.trailer >= HEADER.size and all(map(arena.holds, payloads)):
            whole = [[address] for address in payloads]
            return PoolBatch(keys, whole, [self.block_bytes + HEADER.size])
        headers = np.zeros(HEADER.size * len(payloads), np.uint8)
        first = int(headers.ctypes.data)
        pieces = [[at, first + HEADER.size * i] for i, at in enumerate(payloads)]
        return PoolBatch(keys, pieces, [self.block_bytes, HEADER.size], headers)

    # -- removal

    async def remove(self, keys: Sequence[bytes]) -> None:
        if keys:
            await self.client.remove([self.name(key) for key in keys])

    async def clear(self, generation: int = 0) -> None:
        pattern = "^" + self._prefix
        if await self.client.call(lambda store: int(store.remove_by_regex(pattern, True)), -1) < 0:
            raise StoreError("the Mooncake pool did not remove the objects")
        self.generation = max(self.generation + 1, generation)
