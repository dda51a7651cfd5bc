"""Models of the reference engine whose blocks are spread over ranks, the bytes that a block with a
given hash must have, and requests that check them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import count

import anyio
import numpy as np

from kvactors.cache import KVCache
from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.errors import DeadlineExceeded, KVActorsError, LeaseEnded, NoRoom, RankLost
from kvactors.layout.base import Layout
from kvactors.scenario.engine import Engine, Model, ScenarioRequest
from kvactors.scenario.report import Totals
from kvactors.types import HASH_BYTES, split_hashes
from tests.support.rank_process import RankProcess, keys_on_rank


class WorkerGone(KVActorsError):
    """A rank's process has failed: nothing can be computed until it is back."""


Devices = Callable[[], Sequence[HostDevice | None]]
"""The device of every rank as it is now, None for one that is not there."""


class RankModel(Model):
    """Ranks in this process. verified: blocks checked so far, on all ranks."""

    def __init__(self, layout: Layout, devices: Devices) -> None:
        self.devices = devices
        self.layout = layout
        self.verified = 0
        self._pattern = HostDevice(layout, 1)
        self._slot = Arena(1, layout.block_bytes)
        self._known: dict[bytes, bytes] = {}

    def _shares(self, keys: bytes) -> list[tuple[HostDevice, bytes]]:
        """Each rank's device, and the keys of its shares. WorkerGone."""
        devices = [device for device in self.devices() if device is not None]
        if len(devices) < len(self.devices()):
            raise WorkerGone
        if len(devices) == 1:
            return [(devices[0], keys)]
        return [(device, keys_on_rank(keys, rank)) for rank, device in enumerate(devices)]

    async def fill(self, blocks: Sequence[int], names: bytes) -> None:
        """See `Model.fill`. WorkerGone."""
        for device, share in self._shares(names):
            device.fill(blocks, share)

    async def check(self, blocks: Sequence[int], names: bytes) -> list[int]:
        """See `Model.check`: of the blocks that are wrong on any rank. WorkerGone."""
        self.verified += len(blocks)
        bad: set[int] = set()
        for device, share in self._shares(names):
            bad |= set(device.check(blocks, share))
        return sorted(bad)

    def check_layer(self, layer: int, blocks: Sequence[int], keys: bytes) -> list[int]:
        """Like `check`, for one layer, counted from the layout's first."""
        bad: set[int] = set()
        for device, share in self._shares(keys):
            for j, (block, key) in enumerate(zip(blocks, split_hashes(share), strict=True)):
                self._pattern.fill([0], key)
                for position in self.layout.span(range(layer, layer + 1)):
                    piece = self.layout.pieces[position]
                    expected, found = (
                        self._pattern.region(piece.layer, piece.role),
                        device.region(piece.layer, piece.role),
                    )
                    if not np.array_equal(expected[0], found[block]):
                        bad.add(j)
        return sorted(bad)

    def bytes_of(self, key: bytes) -> bytes:
        """The bytes of a block with that key, as a slot or an object holds them."""
        assert len(key) == HASH_BYTES
        found = self._known.get(key)
        if found is None:
            self._pattern.fill([0], key)
            self._pattern.copy_to_host([0], self._slot, [0])
            found = self._known[key] = bytes(self._slot.view(0))
        return found


class ProcessModel(Model):
    """Ranks in separate processes."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.ranks = ranks

    async def fill(self, blocks: Sequence[int], names: bytes) -> None:
        """See `Model.fill`. WorkerGone."""
        try:
            await asyncio.gather(*(rank.fill(tuple(blocks), names) for rank in self.ranks))
        except ConnectionError as error:
            raise WorkerGone(str(error)) from error

    async def check(self, blocks: Sequence[int], names: bytes) -> list[int]:
        """See `Model.check`: of the blocks that are wrong on any rank. WorkerGone."""
        try:
            found = await asyncio.gather(*(rank.check(tuple(blocks), names) for rank in self.ranks))
        except ConnectionError as error:
            raise WorkerGone(str(error)) from error
        return sorted({index for bad in found for index in bad})


class RankLoad:
    """Requests of the reference engine to a cache whose blocks are spread over ranks, always the
    same ones: prompts of 12 families. Every cached block is checked on every rank.

    Attributes:
        totals: served requests, hits and errors.
        broken: requests that a lost rank or a deadline ended.
    """

    def __init__(self, cache: KVCache, model: Model) -> None:
        self.totals = Totals()
        self.broken = 0
        self._block_size = cache.block_size
        self._numbers = count()
        self._rng = random.Random(0)
        self._engine = Engine(cache, self.totals, model, thorough=True, on_wrong=self._judge)

    @property
    def wrong(self) -> int:
        """Blocks with other bytes, and other errors."""
        return self.totals.corrupt_blocks_served + len(self.totals.errors)

    @property
    def hits(self) -> list[int]:
        """Blocks found, by tier."""
        return [self.totals.device, self.totals.host, self.totals.storage]

    async def serve(self, tokens: list[int]) -> None:
        """One request. A lost rank may end it, any other error is raised."""
        try:
            await self._engine.serve(f"r{next(self._numbers)}", tokens)
        except (WorkerGone, RankLost, LeaseEnded, NoRoom, DeadlineExceeded):
            self.broken += 1

    async def _judge(self, request: ScenarioRequest, _positions: object, _when: str) -> None:
        """Blocks without their bytes are wrong, unless the cache reports that a rank's memory was
        lost."""
        with anyio.move_on_after(10.0):
            while True:
                await asyncio.sleep(0.01)
                await request.lease.commit(request.lease.cached_tokens)  # RankLost ends the request

    async def run(self, requests: int) -> None:
        """So many requests, three at a time."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                family, blocks = self._rng.randrange(12), self._rng.randint(1, 6)
                tokens = blocks * self._block_size + self._rng.randrange(self._block_size)
                await self.serve([family * 1000 + i for i in range(tokens)])
                await asyncio.sleep(0)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(client)
