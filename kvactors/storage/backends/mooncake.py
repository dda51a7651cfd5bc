"""A Mooncake pool as storage: what one node wrote, every node of the pool can load.

An object is a block's payload and a header, in one value that is never changed. The pool belongs to
all its nodes, and its master evicts as it sees fit, so this back end is answerable for no names: it
announces nothing as resident, and an object that is not there is a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.actor.uncancelled import to_the_end
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.mooncake_config import MooncakeConfig
from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.backends.header import HEADER, fits, header_of
from kvactors.storage.backends.mooncake_client import (
    NO_SPACE,
    NOT_FOUND,
    NOT_READY,
    OK,
    MooncakeClient,
)
from kvactors.storage.backends.slab_memory import memory
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

T = TypeVar("T")

BATCH = 32
"""Objects in one call, which cannot be cut short. Two calls at once are slower than one after
another."""

RETRY = 0.2
"""Seconds until objects that found no space are tried once more: a burst outruns the master's
eviction."""


class Place(NamedTuple):
    """Where a block and its header lie, and the pieces of memory that makes."""

    payload: NDArray[np.uint8]
    header: NDArray[np.uint8]
    pointers: list[int]
    sizes: list[int]


class MooncakeBackend(Backend):
    """identity: of the objects; those of different models, namespaces, layouts or ranks have
    different names and headers."""

    trailer = HEADER.size

    def __init__(self, config: MooncakeConfig, identity: StoreIdentity, block_bytes: int) -> None:
        super().__init__(identity.digest, block_bytes)
        self.prefix = identity.pool_prefix
        self._client = MooncakeClient(config, identity.rank)
        self._sums = Workers(1, "kvactors-mooncake-checksum")
        self._arena: Arena | None = None

    def name(self, key: bytes) -> str:
        """What an object is called in the pool."""
        return self.prefix + key.hex()

    async def open(self) -> None:
        """Join the pool. StoreError if that cannot be."""
        await self._client.open()

    async def attach(self, arena: Arena) -> None:
        """Let the arena take part in transfers as it is."""
        size = arena.num_slots * arena.stride
        if size and await self._client.register(arena.address, size) != OK:
            raise StoreError("mooncake would not register the host arena")
        self._arena = arena

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """Only the master knows; nothing while the circuit is open."""
        return 0 if self.breaker.state() == "open" else None

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`. What is asked for gets a lease, so nothing but the leading run is."""
        run = 0
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            if expired() or not self.breaker.closed():
                return run
            codes = await self._client.exist([self.name(key) for key in some])
            self.breaker.saw(any(code >= 0 for code in codes))
            self.counts[Outcome.UNAVAILABLE] += sum(code < 0 for code in codes)
            good = next((i for i, code in enumerate(codes) if code != 1), len(some))
            run += good
            if good < len(some):
                return run
        return run

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`. While one batch moves, the checksums of the one before are looked
        at."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        judging: list[tuple[slice, asyncio.Future[bytes]]] = []
        try:
            for start in range(0, len(keys), BATCH):
                some = slice(start, start + BATCH)
                if expired():
                    break
                if not self.breaker.closed():
                    outcomes[some] = bytes([Outcome.UNAVAILABLE]) * len(keys[some])
                    continue
                places = [self._place(view) for view in views[some]]
                pointers, sizes = (
                    [place.pointers for place in places],
                    [place.sizes for place in places],
                )
                codes = await self._client.get(
                    [self.name(key) for key in keys[some]], pointers, sizes
                )
                judge = partial(self._judge, keys[some], places, codes)
                judging.append((some, asyncio.wrap_future(self._sums.submit(judge))))
        finally:
            for some, judged in judging:
                seen: bytes = await to_the_end(judged)
                outcomes[some] = seen
        corrupt = [
            key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.CORRUPT
        ]
        await self.remove(corrupt)
        self.saw(bytes(outcomes))
        self.reads += outcomes.count(Outcome.OK)
        return ReadReport(bytes(outcomes), [])

    def _judge(self, keys: Sequence[bytes], places: Sequence[Place], codes: Sequence[int]) -> bytes:
        """An outcome a key, of the codes and of what has come."""
        outcomes = bytearray()
        for key, place, code in zip(keys, places, codes, strict=True):
            if code < 0:
                outcomes.append(_outcome(code))
            else:
                whole = code == self.block_bytes + HEADER.size
                good = whole and fits(place.header, self.fingerprint, key, place.payload)
                outcomes.append(Outcome.OK if good else Outcome.CORRUPT)
        return bytes(outcomes)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`. An object that is there is not written again, which the pool does
        not tell apart."""
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
        self.saw(bytes(outcomes))
        self.writes += outcomes.count(Outcome.OK)
        return WriteReport(bytes(outcomes), [])

    async def _write(
        self,
        which: Sequence[int],
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        outcomes: bytearray,
    ) -> None:
        codes = [-1] * len(which)
        if self.breaker.closed():
            places = [self._place(views[i]) for i in which]

            def head() -> None:
                for i, place in zip(which, places, strict=True):
                    place.header[:] = np.frombuffer(
                        header_of(self.fingerprint, keys[i], place.payload), np.uint8
                    )

            await self._aside(head)
            pointers, sizes = (
                [place.pointers for place in places],
                [place.sizes for place in places],
            )
            codes = await self._client.put([self.name(keys[i]) for i in which], pointers, sizes)
        for i, code in zip(which, codes, strict=True):
            outcomes[i] = _outcome(code)

    def _place(self, view: memoryview) -> Place:
        """A slot of the arena is one piece with its trailer: over a network a piece more costs as
        much as a small block."""
        payload, arena = np.frombuffer(view, np.uint8), self._arena
        address, size = int(payload.ctypes.data), self.block_bytes
        if arena is not None and arena.holds(address) and arena.trailer >= HEADER.size:
            header = np.frombuffer(memory(address + size, HEADER.size), np.uint8)
            return Place(payload, header, [address], [size + HEADER.size])
        header = np.zeros(HEADER.size, np.uint8)
        return Place(payload, header, [address, int(header.ctypes.data)], [size, HEADER.size])

    async def _aside(self, work: Callable[[], T]) -> T:
        """Checksums are no work for the loop."""
        return await to_the_end(asyncio.wrap_future(self._sums.submit(work)))

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`."""
        if keys:
            await self._client.remove([self.name(key) for key in keys])

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`: of this identity, for every node of the pool."""
        if (
            await self._client.call(
                lambda store: int(store.remove_by_regex("^" + self.prefix, True)), -1
            )
            < 0
        ):
            raise StoreError("the Mooncake pool did not remove the objects")
        self.generation = max(self.generation + 1, generation)

    async def close(self) -> None:
        """Leave the pool; what this node's memory held of it is gone."""
        if self._arena is not None:
            await self._client.unregister(self._arena.address)
        await self._client.close()
        self._sums.close()


def _outcome(code: int) -> Outcome:
    """What a code of the client means for a key."""
    if code >= OK:
        return Outcome.OK
    return {NO_SPACE: Outcome.NO_SPACE, NOT_FOUND: Outcome.MISS, NOT_READY: Outcome.MISS}.get(
        code, Outcome.UNAVAILABLE
    )
