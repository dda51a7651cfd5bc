"""A Mooncake pool as storage: what one node wrote, every node of the pool can load.

An object is a block's payload and a header, in one value that is never changed. The pool belongs to all its nodes, and its master evicts as
it sees fit, so this back end is answerable for no names: it announces nothing as resident, and an object that is not there is a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import numpy as np

from kvactors.actor.uncancelled import to_the_end
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.mooncake_config import MooncakeConfig
from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.backends.header import HEADER, fits, header_of
from kvactors.storage.backends.mooncake_client import NO_SPACE, NOT_FOUND, NOT_READY, OK, MooncakeClient
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

T = TypeVar("T")

BATCH = 16
"""Objects in one call, which cannot be cut short."""

AT_ONCE = 2
"""Calls at once: while one batch moves, the checksums of another are looked at."""

RETRY = 0.2
"""Seconds until objects that found no space are tried once more: a burst outruns the master's eviction."""


class MooncakeBackend(Backend):
    """rank, ranks: this process's part of every block; objects of different ranks never mix."""

    def __init__(self, config: MooncakeConfig, fingerprint: bytes, block_bytes: int, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(fingerprint, block_bytes)
        self.prefix = f"kvactors/{fingerprint.hex()[:32]}/{rank}-of-{ranks}/"
        self._client = MooncakeClient(config, rank)
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

    async def read(self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired) -> ReadReport:
        """See `Backend.read`."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)

        async def batch(start: int) -> None:
            some = slice(start, start + BATCH)
            outcomes[some] = await self._read(keys[some], views[some])

        await self._each(len(keys), batch, expired)
        corrupt = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.CORRUPT]
        await self.remove(corrupt)
        self.saw(bytes(outcomes))
        self.reads += outcomes.count(Outcome.OK)
        return ReadReport(bytes(outcomes), [])

    async def _read(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> bytes:
        if not self.breaker.closed():
            return bytes([Outcome.UNAVAILABLE]) * len(keys)
        payloads = [np.frombuffer(view, np.uint8) for view in views]
        headers = np.zeros((len(keys), HEADER.size), np.uint8)
        pointers = [[p.ctypes.data, h.ctypes.data] for p, h in zip(payloads, headers, strict=True)]
        sizes = [[self.block_bytes, HEADER.size]] * len(keys)
        codes = await self._client.get([self.name(key) for key in keys], pointers, sizes)
        whole = self.block_bytes + HEADER.size

        def judge() -> bytes:
            return bytes(
                _outcome(code)
                if code < 0
                else Outcome.OK
                if code == whole and fits(header, self.fingerprint, key, payload)
                else Outcome.CORRUPT
                for code, header, key, payload in zip(codes, headers, keys, payloads, strict=True)
            )

        return await self._aside(judge)

    async def write(self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired) -> WriteReport:
        """See `Backend.write`. An object that is there is not written again, which the pool does not tell apart."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)

        async def batch(start: int) -> None:
            some = list(range(start, min(start + BATCH, len(keys))))
            await self._write(some, keys, views, outcomes)
            full = [i for i in some if outcomes[i] == Outcome.NO_SPACE]
            if full and not expired():
                await anyio.sleep(RETRY)
                await self._write(full, keys, views, outcomes)

        await self._each(len(keys), batch, expired)
        self.saw(bytes(outcomes))
        self.writes += outcomes.count(Outcome.OK)
        return WriteReport(bytes(outcomes), [])

    async def _write(
        self, which: Sequence[int], keys: Sequence[bytes], views: Sequence[memoryview], outcomes: bytearray
    ) -> None:
        codes = [-1] * len(which)
        if self.breaker.closed():
            payloads = [np.frombuffer(views[i], np.uint8) for i in which]
            texts = await self._aside(lambda: [header_of(self.fingerprint, keys[i], views[i]) for i in which])
            headers = [np.frombuffer(text, np.uint8) for text in texts]
            pointers = [[p.ctypes.data, h.ctypes.data] for p, h in zip(payloads, headers, strict=True)]
            sizes = [[self.block_bytes, HEADER.size]] * len(which)
            codes = await self._client.put([self.name(keys[i]) for i in which], pointers, sizes)
        for i, code in zip(which, codes, strict=True):
            outcomes[i] = _outcome(code)

    async def _each(self, count: int, batch: Callable[[int], Awaitable[None]], expired: Expired) -> None:
        """Every batch that begins before the deadline, a few at once."""
        starts = iter(range(0, count, BATCH))

        async def work() -> None:
            for start in starts:
                if expired():
                    return
                await batch(start)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(AT_ONCE, -(-count // BATCH))):
                tasks.start_soon(work)

    async def _aside(self, work: Callable[[], T]) -> T:
        """Checksums are no work for the loop."""
        return await to_the_end(asyncio.wrap_future(self._sums.submit(work)))

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`."""
        if keys:
            await self._client.remove([self.name(key) for key in keys])

    async def clear(self) -> None:
        """See `Backend.clear`: of this fingerprint and rank, for every node of the pool."""
        await self._client.call(lambda store: int(store.remove_by_regex("^" + self.prefix, True)), -1)

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
    return {NO_SPACE: Outcome.NO_SPACE, NOT_FOUND: Outcome.MISS, NOT_READY: Outcome.MISS}.get(code, Outcome.UNAVAILABLE)
