"""Objects of a Mooncake pool: their names, their headers, and their moves in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.device.arena import Arena
from kvactors.native import addresses, headers_fit, make_headers
from kvactors.storage.backends.header import HEADER
from kvactors.storage.backends.mooncake_client import MooncakeClient
from kvactors.storage.backends.mooncake_codes import NO_SPACE, NOT_FOUND, NOT_READY, OK
from kvactors.storage.breaker import Breaker
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

BATCH = 32
"""Objects in one question to the master, at most."""

CALL_BYTES = 64 << 20
"""Bytes of the objects in one transfer, which cannot be cut short, unless that is more than
`MOST_OBJECTS` or less than `LEAST_OBJECTS`. A call costs about 0.5 ms, which is the time of 4 MiB
in memory. Two concurrent transfers are slower than two in sequence."""

LEAST_OBJECTS, MOST_OBJECTS = 4, 1024

SHORT = 4
"""Part of a batch, or of a call, that the transfer of the rest hides no checksums of: the first to
be written and the last to be read."""

WHOLE_BYTES = 16 << 20
"""Bytes of a batch that is not worth another call."""

RETRY = 0.2
"""Seconds until objects that found no space are tried once more: a burst outruns the master's
eviction."""


class Places(NamedTuple):
    """Memory of some objects.

    Attributes:
        keys: joined.
        payloads, headers: addresses.
        pointers, sizes: of the pieces of each that a transfer is made of.
        memory: of the headers that are in no arena.
    """

    keys: bytes
    payloads: list[int]
    headers: list[int]
    pointers: list[list[int]]
    sizes: list[list[int]]
    memory: NDArray[np.uint8]


def cuts(count: int, step: int, block_bytes: int) -> list[int]:
    """Objects in each call of a batch that is written, `step` at most. A read has the same calls in
    the opposite order. Checksums of a call are computed during the transfer before or behind it, so
    the first call is short."""
    short = min(count, step) // SHORT
    first = [short] if short and count * block_bytes > WHOLE_BYTES else []
    rest = count - sum(first)
    return first + [min(step, rest - start) for start in range(0, rest, step)]


def slices(parts: Iterable[int]) -> Iterator[slice]:
    """Consecutive slices of these lengths."""
    start = 0
    for part in parts:
        yield slice(start, start + part)
        start += part


class MooncakeObjects:
    """Reads and writes objects, each a block and its header.

    Attributes:
        arena: memory that is registered with the client, None before there is any.

    Args:
        prefix: of the objects' names.
        digest: in every header.
        breaker: no call begins while it is open.
    """

    def __init__(
        self,
        client: MooncakeClient,
        prefix: str,
        digest: bytes,
        block_bytes: int,
        breaker: Callable[[], Breaker],
    ) -> None:
        self.arena: Arena | None = None
        self._client = client
        self._prefix = prefix
        self._digest = digest
        self._block_bytes = block_bytes
        self._breaker = breaker
        self._step = max(LEAST_OBJECTS, min(MOST_OBJECTS, CALL_BYTES // block_bytes))
        # One thread for checksums, which would block the loop.
        self._checksums = Workers(1, "kvactors-mooncake-checksum")

    def name(self, key: bytes) -> str:
        """The name of an object in the pool."""
        return self._prefix + key.hex()

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]
    ) -> bytearray:
        """One outcome a key. While one transfer runs, the checksums of the one before are
        verified."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        verifying: list[tuple[slice, asyncio.Future[bytes]]] = []
        try:
            for some in slices(reversed(self._cuts(len(keys)))):
                if expired():
                    break
                if not self._breaker().closed():
                    outcomes[some] = bytes([Outcome.UNAVAILABLE]) * len(keys[some])
                    continue
                places = self._places(keys[some], views[some])
                names = [self.name(key) for key in keys[some]]
                codes = await self._client.get(names, places.pointers, places.sizes)
                verify = partial(self._verify, places, codes)
                verifying.append((some, asyncio.wrap_future(self._checksums.submit(verify))))
        finally:
            for some, verified in verifying:
                found: bytes = await wait_uncancelled(verified)
                outcomes[some] = found
        return outcomes

    def _cuts(self, count: int) -> list[int]:
        return cuts(count, self._step, self._block_bytes)

    def _verify(self, places: Places, codes: Sequence[int]) -> bytes:
        """One outcome a key, from the codes and the bytes that arrived."""
        size, whole = self._block_bytes, self._block_bytes + HEADER.size
        arrived = [i for i, code in enumerate(codes) if code == whole]
        keys = b"".join(places.keys[32 * i : 32 * i + 32] for i in arrived)
        fit = headers_fit(
            self._digest,
            keys,
            [places.payloads[i] for i in arrived],
            [places.headers[i] for i in arrived],
            size,
        )
        outcomes = bytearray(Outcome.CORRUPT if code >= 0 else outcome_of(code) for code in codes)
        for i, good in zip(arrived, fit, strict=True):
            if good:
                outcomes[i] = Outcome.OK
        return bytes(outcomes)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]
    ) -> bytearray:
        """One outcome a key. A stored object is not written again: the pool reports it as written.
        While one transfer runs, the headers of the next one are made."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        ahead: asyncio.Future[Places] | None = None
        calls = [range(len(keys))[some] for some in slices(self._cuts(len(keys)))]
        try:
            for some, then in zip(calls, [*calls[1:], None], strict=True):
                if expired():
                    break
                if not self._breaker().closed():
                    rest = slice(some.start, None)
                    outcomes[rest] = bytes([Outcome.UNAVAILABLE]) * len(outcomes[rest])
                    break
                ahead = ahead or self._prepared(some, keys, views)
                places = await wait_uncancelled(ahead)
                ahead = self._prepared(then, keys, views) if then else None
                await self._put(some, keys, places, outcomes)
                full = [i for i in some if outcomes[i] == Outcome.NO_SPACE]
                if full and not expired():
                    await anyio.sleep(RETRY)
                    await self._write_again(full, keys, views, outcomes)
        finally:
            if ahead is not None:
                await wait_uncancelled(ahead)  # it reads views
        return outcomes

    async def _write_again(
        self,
        which: Sequence[int],
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        outcomes: bytearray,
    ) -> None:
        if not self._breaker().closed():
            for i in which:
                outcomes[i] = Outcome.UNAVAILABLE
            return
        places = await wait_uncancelled(self._prepared(which, keys, views))
        await self._put(which, keys, places, outcomes)

    def _prepared(
        self, which: Sequence[int], keys: Sequence[bytes], views: Sequence[memoryview]
    ) -> asyncio.Future[Places]:
        """Objects with their headers, made in a thread."""
        places = self._places([keys[i] for i in which], [views[i] for i in which])

        def make() -> Places:
            _, payloads, headers, *_ = places
            make_headers(self._digest, places.keys, payloads, headers, self._block_bytes)
            return places

        return asyncio.wrap_future(self._checksums.submit(make))

    async def _put(
        self, which: Sequence[int], keys: Sequence[bytes], places: Places, outcomes: bytearray
    ) -> None:
        names = [self.name(keys[i]) for i in which]
        codes = await self._client.put(names, places.pointers, places.sizes)
        for i, code in zip(which, codes, strict=True):
            outcomes[i] = outcome_of(code)

    def _places(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> Places:
        """A slot of the arena is one piece with its trailer: over a network, another piece costs as
        much as a small block."""
        size, arena = self._block_bytes, self.arena
        payloads = addresses(list(views))
        if arena is not None and arena.trailer >= HEADER.size and all(map(arena.holds, payloads)):
            behind = [address + size for address in payloads]
            pointers, sizes = [[address] for address in payloads], [[size + HEADER.size]]
            none = np.zeros(0, np.uint8)
            return Places(b"".join(keys), payloads, behind, pointers, sizes * len(views), none)
        memory = np.zeros(HEADER.size * len(views), np.uint8)
        first = int(memory.ctypes.data)
        headers = [first + HEADER.size * i for i in range(len(views))]
        pieces = [list(pair) for pair in zip(payloads, headers, strict=True)]
        return Places(
            b"".join(keys), payloads, headers, pieces, [[size, HEADER.size]] * len(views), memory
        )

    def close(self) -> None:
        """End the thread of the checksums."""
        self._checksums.close()


def outcome_of(code: int) -> Outcome:
    """The outcome that a return code of the client stands for."""
    if code >= OK:
        return Outcome.OK
    return {NO_SPACE: Outcome.NO_SPACE, NOT_FOUND: Outcome.MISS, NOT_READY: Outcome.MISS}.get(
        code, Outcome.UNAVAILABLE
    )
