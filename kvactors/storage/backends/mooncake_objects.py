"""Objects of a Mooncake pool: their names, their headers, and their moves in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.device.arena import Arena
from kvactors.storage.backends.header import HEADER, fits, header_of
from kvactors.storage.backends.mooncake_client import MooncakeClient
from kvactors.storage.backends.mooncake_codes import NO_SPACE, NOT_FOUND, NOT_READY, OK
from kvactors.storage.backends.slab_memory import memory
from kvactors.storage.breaker import Breaker
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

BATCH = 32
"""Objects in one call, which cannot be cut short. Two concurrent calls are slower than two in
sequence."""

RETRY = 0.2
"""Seconds until objects that found no space are tried once more: a burst outruns the master's
eviction."""


class Place(NamedTuple):
    """Memory of a block and of its header, and the pieces that a transfer is made of."""

    payload: NDArray[np.uint8]
    header: NDArray[np.uint8]
    pointers: list[int]
    sizes: list[int]


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
        # One thread for checksums, which would block the loop.
        self._checksums = Workers(1, "kvactors-mooncake-checksum")

    def name(self, key: bytes) -> str:
        """The name of an object in the pool."""
        return self._prefix + key.hex()

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]
    ) -> bytearray:
        """One outcome a key. While one batch moves, the checksums of the batch before are
        verified."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        verifying: list[tuple[slice, asyncio.Future[bytes]]] = []
        try:
            for start in range(0, len(keys), BATCH):
                some = slice(start, start + BATCH)
                if expired():
                    break
                if not self._breaker().closed():
                    outcomes[some] = bytes([Outcome.UNAVAILABLE]) * len(keys[some])
                    continue
                places = [self._place(view) for view in views[some]]
                codes = await self._client.get(
                    [self.name(key) for key in keys[some]],
                    [place.pointers for place in places],
                    [place.sizes for place in places],
                )
                verify = partial(self._verify, keys[some], places, codes)
                verifying.append((some, asyncio.wrap_future(self._checksums.submit(verify))))
        finally:
            for some, verified in verifying:
                found: bytes = await wait_uncancelled(verified)
                outcomes[some] = found
        return outcomes

    def _verify(
        self, keys: Sequence[bytes], places: Sequence[Place], codes: Sequence[int]
    ) -> bytes:
        """One outcome a key, from the codes and the bytes that arrived."""
        outcomes = bytearray()
        for key, place, code in zip(keys, places, codes, strict=True):
            if code < 0:
                outcomes.append(outcome_of(code))
            else:
                whole = code == self._block_bytes + HEADER.size
                good = whole and fits(place.header, self._digest, key, place.payload)
                outcomes.append(Outcome.OK if good else Outcome.CORRUPT)
        return bytes(outcomes)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]
    ) -> bytearray:
        """One outcome a key. A stored object is not written again: the pool reports it as
        written."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        for start in range(0, len(keys), BATCH):
            if expired():
                break
            some = list(range(start, min(start + BATCH, len(keys))))
            await self._write(some, keys, views, outcomes)
            full = [i for i in some if outcomes[i] == Outcome.NO_SPACE]
            if full and not expired():
                await anyio.sleep(RETRY)
                await self._write(full, keys, views, outcomes)
        return outcomes

    async def _write(
        self,
        which: Sequence[int],
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        outcomes: bytearray,
    ) -> None:
        codes = [-1] * len(which)
        if self._breaker().closed():
            places = [self._place(views[i]) for i in which]

            def make_headers() -> None:
                for i, place in zip(which, places, strict=True):
                    header = header_of(self._digest, keys[i], place.payload)
                    place.header[:] = np.frombuffer(header, np.uint8)

            await wait_uncancelled(asyncio.wrap_future(self._checksums.submit(make_headers)))
            codes = await self._client.put(
                [self.name(keys[i]) for i in which],
                [place.pointers for place in places],
                [place.sizes for place in places],
            )
        for i, code in zip(which, codes, strict=True):
            outcomes[i] = outcome_of(code)

    def _place(self, view: memoryview) -> Place:
        """A slot of the arena is one piece with its trailer: over a network, another piece costs as
        much as a small block."""
        payload, arena = np.frombuffer(view, np.uint8), self.arena
        address, size = int(payload.ctypes.data), self._block_bytes
        if arena is not None and arena.holds(address) and arena.trailer >= HEADER.size:
            header = np.frombuffer(memory(address + size, HEADER.size), np.uint8)
            return Place(payload, header, [address], [size + HEADER.size])
        header = np.zeros(HEADER.size, np.uint8)
        return Place(payload, header, [address, int(header.ctypes.data)], [size, HEADER.size])

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
