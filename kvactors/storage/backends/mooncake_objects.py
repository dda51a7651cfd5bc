"""Objects of a Mooncake pool: their names, their headers, and their moves in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.clock import now
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.device.arena import Arena
from kvactors.native import addresses, headers_fit, make_headers
from kvactors.storage.backends.header import HEADER
from kvactors.storage.backends.mooncake_calls import CallSize
from kvactors.storage.backends.mooncake_client import MooncakeClient
from kvactors.storage.backends.mooncake_codes import NO_SPACE, NOT_FOUND, NOT_READY, OK
from kvactors.storage.breaker import Breaker
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

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


class MooncakeObjects:
    """Reads and writes objects, each a block and its header.

    Attributes:
        arena: memory that is registered with the client, None before there is any.
        calls: objects of each transfer.

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
        self.calls = CallSize(block_bytes)
        # One thread for checksums, which would block the loop.
        self._checksums = Workers(1, "kvactors-mooncake-checksum")

    def name(self, key: bytes) -> str:
        """The name of an object in the pool."""
        return self._prefix + key.hex()

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]
    ) -> bytearray:
        """One outcome a key."""
        payloads = addresses(list(views))
        return await self._read(keys, payloads, self._in_arena(payloads), expired)

    async def read_slots(
        self, keys: Sequence[bytes], slots: Sequence[int], expired: Callable[[], bool]
    ) -> bytearray:
        """`read` into slots of the arena (see `has_slots`)."""
        return await self._read(keys, self._payloads(slots), True, expired)

    async def _read(
        self,
        keys: Sequence[bytes],
        payloads: list[int],
        in_arena: bool,
        expired: Callable[[], bool],
    ) -> bytearray:
        """While one transfer runs, the checksums of the one before are verified."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        verifying: list[tuple[slice, asyncio.Future[bytes]]] = []
        try:
            for some in self.calls.parts(len(keys)):
                if expired():
                    break
                if not self._breaker().closed():
                    outcomes[some] = bytes([Outcome.UNAVAILABLE]) * len(keys[some])
                    continue
                places = self._places(keys[some], payloads[some], in_arena)
                names = [self.name(key) for key in keys[some]]
                began = now()
                codes = await self._client.get(names, places.pointers, places.sizes)
                self.calls.took(sum(code > 0 for code in codes), now() - began)
                verify = partial(self._verify, places, codes)
                verifying.append((some, asyncio.wrap_future(self._checksums.submit(verify))))
        finally:
            for some, verified in verifying:
                found: bytes = await wait_uncancelled(verified)
                outcomes[some] = found
        return outcomes

    def _verify(self, places: Places, codes: Sequence[int]) -> bytes:
        """One outcome a key, from the codes and the bytes that arrived."""
        whole = self._block_bytes + HEADER.size
        if codes.count(whole) == len(places.payloads) == len(codes):
            arrived: Sequence[int] = range(len(codes))
            keys, payloads, headers = places.keys, places.payloads, places.headers
        else:
            arrived = [i for i, code in enumerate(codes) if code == whole]
            keys = b"".join(places.keys[32 * i : 32 * i + 32] for i in arrived)
            payloads = [places.payloads[i] for i in arrived]
            headers = [places.headers[i] for i in arrived]
        fit = headers_fit(self._digest, keys, payloads, headers, self._block_bytes)
        if len(arrived) == len(codes) and all(fit):
            return bytes([Outcome.OK]) * len(codes)
        outcomes = bytearray(Outcome.CORRUPT if code >= 0 else outcome_of(code) for code in codes)
        for i, good in zip(arrived, fit, strict=True):
            if good:
                outcomes[i] = Outcome.OK
        return bytes(outcomes)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]
    ) -> bytearray:
        """One outcome a key. The pool reports an object that it has as written."""
        payloads = addresses(list(views))
        return await self._write(keys, payloads, self._in_arena(payloads), expired)

    async def write_slots(
        self, keys: Sequence[bytes], slots: Sequence[int], expired: Callable[[], bool]
    ) -> bytearray:
        """`write` from slots of the arena (see `has_slots`)."""
        return await self._write(keys, self._payloads(slots), True, expired)

    async def _write(
        self,
        keys: Sequence[bytes],
        payloads: list[int],
        in_arena: bool,
        expired: Callable[[], bool],
    ) -> bytearray:
        """While one transfer runs, the headers of the next one are made."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        ahead: asyncio.Future[Places] | None = None
        calls = list(self.calls.parts(len(keys)))

        def prepared(some: slice) -> asyncio.Future[Places]:
            return self._prepared(keys[some], payloads[some], in_arena)

        try:
            for some, then in zip(calls, [*calls[1:], None], strict=False):
                if expired():
                    break
                if not self._breaker().closed():
                    rest = slice(some.start, None)
                    outcomes[rest] = bytes([Outcome.UNAVAILABLE]) * len(outcomes[rest])
                    break
                places = await wait_uncancelled(ahead or prepared(some))
                ahead = prepared(then) if then else None
                outcomes[some] = await self._put(keys[some], places)
                full = [i for i in range(some.start, some.stop) if outcomes[i] == Outcome.NO_SPACE]
                if full and not expired():
                    await anyio.sleep(RETRY)
                    for i, outcome in zip(
                        full, await self._again(full, keys, payloads, in_arena), strict=True
                    ):
                        outcomes[i] = outcome
        finally:
            if ahead is not None:
                await wait_uncancelled(ahead)  # it reads the payloads
        return outcomes

    async def _again(
        self, which: list[int], keys: Sequence[bytes], payloads: list[int], in_arena: bool
    ) -> bytes:
        """Outcomes of a second attempt to write."""
        if not self._breaker().closed():
            return bytes([Outcome.UNAVAILABLE]) * len(which)
        some = [keys[i] for i in which]
        making = self._prepared(some, [payloads[i] for i in which], in_arena)
        return await self._put(some, await wait_uncancelled(making))

    def _prepared(
        self, keys: Sequence[bytes], payloads: list[int], in_arena: bool
    ) -> asyncio.Future[Places]:
        """Objects with their headers, made in a thread."""
        places = self._places(keys, payloads, in_arena)

        def make() -> Places:
            make_headers(self._digest, places.keys, payloads, places.headers, self._block_bytes)
            return places

        return asyncio.wrap_future(self._checksums.submit(make))

    async def _put(self, keys: Sequence[bytes], places: Places) -> bytes:
        names = [self.name(key) for key in keys]
        began = now()
        codes = await self._client.put(names, places.pointers, places.sizes)
        self.calls.took(codes.count(OK), now() - began)
        if len(codes) == len(names) and codes.count(OK) == len(codes):
            return bytes([Outcome.OK]) * len(codes)
        return bytes(outcome_of(code) for code, _ in zip(codes, names, strict=True))

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

    def _payloads(self, slots: Sequence[int]) -> list[int]:
        if self.arena is None:
            raise ValueError("no arena is attached")
        address, stride = self.arena.address, self.arena.stride
        return [address + slot * stride for slot in slots]

    def _in_arena(self, payloads: Sequence[int]) -> bool:
        """Whether there is space for a header behind each payload."""
        arena = self.arena
        fits = arena is not None and arena.trailer >= HEADER.size
        return arena is not None and fits and all(map(arena.holds, payloads))

    def _places(self, keys: Sequence[bytes], payloads: list[int], in_arena: bool) -> Places:
        """A slot of the arena is one piece with its trailer: over a network, another piece costs as
        much as a small block."""
        size = self._block_bytes
        if in_arena:
            behind = [address + size for address in payloads]
            pointers, sizes = [[address] for address in payloads], [[size + HEADER.size]]
            none = np.zeros(0, np.uint8)
            return Places(b"".join(keys), payloads, behind, pointers, sizes * len(payloads), none)
        memory = np.zeros(HEADER.size * len(payloads), np.uint8)
        first = int(memory.ctypes.data)
        headers = [first + HEADER.size * i for i in range(len(payloads))]
        pieces = [list(pair) for pair in zip(payloads, headers, strict=True)]
        return Places(
            b"".join(keys), payloads, headers, pieces, [[size, HEADER.size]] * len(payloads), memory
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
