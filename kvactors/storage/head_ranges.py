"""A shared store with several objects for each block of a rank, one for each range of its KV heads.

The object of range p of P is the one that rank p of P ranks would store. So caches with any number
of ranks that divides P read and write the same objects. A block is a hit if all objects of its rank
are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import groupby, product
from math import prod
from typing import Any, TypeVar

import numpy as np

from kvactors.device.arena import Arena
from kvactors.layout.base import Layout, Piece
from kvactors.storage.backend import Expired, Keys, SlotViews, Views
from kvactors.storage.messages import Outcome
from kvactors.storage.shared import SharedStore
from kvactors.threads import Workers

T = TypeVar("T")

WINDOW_BYTES = 32 << 20
LEAST_BLOCKS, MOST_BLOCKS = 4, 64
"""Limits of a window: memory through which the objects of some blocks move."""

THREADS = 2
"""Threads that divide and join blocks."""


def runs_of(layout: Layout, ranges: int) -> list[tuple[int, int, int]]:
    """Runs of a block's bytes in which the ranges alternate at equal distances: start, stop, and
    the bytes of a range at a time."""

    def stride(piece: Piece) -> int:
        return piece.nbytes // prod(piece.shape[: layout.heads_axis]) // ranges

    found, stop = [], 0
    for size, pieces in groupby(layout.pieces, stride):
        start, stop = stop, stop + sum(piece.nbytes for piece in pieces)
        found.append((start, stop, size))
    return found


class HeadRangeStore(SharedStore):
    """The stores of the ranges of one rank, as one store of its blocks.

    Args:
        layout: of a block, whose heads are divided among the stores in order.
        stores: of the ranges, not open yet.
        windows: batches that move at once. Others wait.
    """

    def __init__(self, layout: Layout, stores: Sequence[SharedStore], windows: int) -> None:
        first = stores[0]
        super().__init__(first.digest, layout.block_bytes)
        self.slot_trailer_bytes, self.questions = first.slot_trailer_bytes, first.questions
        self.more_space = first.more_space
        self.stores = stores
        for one in stores:
            one.counters = self.counters
        self._runs = runs_of(layout, len(stores))
        self._blocks = min(MOST_BLOCKS, max(LEAST_BLOCKS, WINDOW_BYTES // layout.block_bytes))
        self._windows: asyncio.Queue[int] = asyncio.Queue()  # first slots of those that are free
        slots, trailer = self._blocks * windows, self.slot_trailer_bytes
        for slot in range(0, slots, self._blocks):
            self._windows.put_nowait(slot)
        self._arenas = [Arena(slots, one.block_bytes, trailer=trailer) for one in stores]
        self._workers = Workers(THREADS, "kvactors-head-ranges")

    async def open(self) -> None:
        for one in self.stores:  # in turn: those of a Mooncake pool have one client
            await one.open()

    async def attach(self, arena: Arena) -> None:
        """The stores move memory of windows. In a slot the bytes of a range have gaps."""
        await self._each(lambda one, memory: one.attach(memory))

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for one in self.stores:
                stack.push_async_callback(one.close)
        self._workers.close()
        self.stuck = any(one.stuck for one in self.stores)
        for memory in self._arenas:
            (memory.keep if self.stuck else memory.close)()

    def trouble(self) -> str:
        return next(filter(None, (one.trouble() for one in self.stores)), "")

    async def _each(self, call: Callable[[SharedStore, Arena], Awaitable[T]]) -> Sequence[T]:
        """The results of a call of each store. Every call has ended."""
        calls = map(call, self.stores, self._arenas)
        results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error
        return results

    async def exists_many(self, keys: Keys, expired: Expired) -> list[bool]:
        found = await self._each(lambda one, _: one.exists_many(keys, expired))
        return list(map(all, zip(*found, strict=True)))

    # -- reads and writes

    async def get(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        return await self._move(keys, views, expired, join=True)

    async def put(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        return await self._move(keys, views, expired, join=False)

    async def _move(self, keys: Keys, views: Views, expired: Expired, *, join: bool) -> bytes:
        """Read or write a batch through a window. Nothing begins after the deadline, or after an
        object that got no answer: the next one could take the store's time-out again."""
        first = await self._windows.get()
        outcomes, rest = b"", Outcome.LATE
        try:
            while len(outcomes) < len(keys) and not expired() and rest == Outcome.LATE:
                some = slice(len(outcomes), len(outcomes) + self._blocks)
                outcomes += await self._through(first, keys[some], views[some], expired, join=join)
                if Outcome.UNAVAILABLE in outcomes:
                    rest = Outcome.UNAVAILABLE
        finally:
            self._windows.put_nowait(first)
        return outcomes.ljust(len(keys), bytes([rest]))

    async def _through(
        self, first: int, keys: Keys, views: Views, expired: Expired, *, join: bool
    ) -> bytes:
        """Read or write blocks through the window with this first slot."""
        slots = range(first, first + len(keys))
        if not join:
            await self._copy(views, slots, join=False)

        def transfer(one: SharedStore, memory: Arena) -> Awaitable[bytes]:
            return (one.get if join else one.put)(keys, SlotViews(memory, slots), expired)

        found = zip(*await self._each(transfer), strict=True)
        # A block is moved if every object is there and one was moved.
        outcomes = bytes(max(each) if max(each) > Outcome.EXISTS else min(each) for each in found)
        if join:
            whole = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.OK]
            await self._copy([views[i] for i in whole], [slots[i] for i in whole], join=True)
        return outcomes

    async def _copy(self, views: Views, slots: Sequence[int], *, join: bool) -> None:
        """Copy blocks between their slots and a window, in a thread."""

        def copy() -> None:
            count = len(self._arenas)
            for (view, slot), (i, memory) in product(pairs, enumerate(self._arenas)):
                block, share = (np.frombuffer(one, np.uint8) for one in (view, memory.view(slot)))
                for start, stop, stride in self._runs:
                    ours = block[start:stop].reshape(-1, count, stride)[:, i]
                    theirs = share[start // count : stop // count].reshape(-1, stride)
                    np.copyto(*((ours, theirs) if join else (theirs, ours)))

        pairs = zip(views, slots, strict=True)
        await self._workers.run(copy)

    # -- removal

    async def remove(self, keys: Keys) -> None:
        await self._each(lambda one, _: one.remove(keys))

    async def remove_all(self) -> None:
        await self._each(lambda one, _: one.remove_all())

    @property
    def removed_outside(self) -> bool:  # type: ignore[override]
        return any(one.removed_outside for one in self.stores)

    def take_removed(self) -> list[bytes]:
        """Blocks of which an object is gone."""
        return list(dict.fromkeys(key for one in self.stores for key in one.take_removed()))
