"""Base of the stores that several nodes share: Mooncake, object stores, Valkey."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from kvactors.device.arena import Arena
from kvactors.identity import Lineage
from kvactors.native import addresses
from kvactors.storage.backend import Backend, Expired, Keys, ReadReport, Views, WriteReport
from kvactors.storage.header import HEADER, PoolHeaders
from kvactors.storage.messages import Outcome


class SharedStore(Backend):
    """A store whose other users write and evict objects: only the store knows its keys. Objects
    have headers, no lineages and no salts.

    Attributes:
        headers: of its objects.
        arena: the slots, if each has space for a header behind it.
        questions: keys of a path that are asked for at first, and at once then.
    """

    questions = (1, 1)

    def __init__(self, digest: bytes, block_bytes: int, *, checksums: bool = True) -> None:
        super().__init__(digest, block_bytes)
        self.headers = PoolHeaders(digest, block_bytes, checksums)
        self.arena: Arena | None = None
        self._trouble = ""

    async def attach(self, arena: Arena) -> None:
        if arena.trailer >= HEADER.size and arena.block_bytes == self.block_bytes:
            self.arena = arena

    def trouble(self) -> str:
        return self._trouble

    def probe(self, keys: Keys) -> int | None:
        """None: only the store can answer."""
        return None

    async def ask(self, keys: Keys, expired: Expired) -> int:
        """Keys of the questions behind a missing one are not asked for."""
        run = 0
        while run < len(keys) and not expired():
            some = keys[run : run + (self.questions[run > 0])]
            found = await self.exists_many(some, expired)
            if False in found:
                return run + found.index(False)
            run += len(some)
        return run

    async def read(self, keys: Keys, views: Views, expired: Expired) -> ReadReport:
        """Corrupt objects are removed from the store."""
        outcomes = await self.get(keys, views, expired)
        results = list(zip(keys, outcomes, strict=True))
        corrupt = [key for key, outcome in results if outcome == Outcome.CORRUPT]
        if corrupt:
            await self.remove(corrupt)
        return ReadReport(outcomes, corrupt + [k for k, one in results if one == Outcome.MISS])

    async def write(
        self,
        keys: Keys,
        views: Views,
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        return WriteReport(await self.put(keys, views, expired), [])

    async def clear(self, generation: int = 0) -> None:
        await self.remove_all()
        self.generation = max(self.generation + 1, generation)

    def unpack(self, keys: Keys, values: list[memoryview], views: Views, codes: list[int]) -> bytes:
        """Compare objects with their headers, and copy the payloads of whole objects. codes: of
        `PoolHeaders.compare`. For a thread: numpy copies without the interpreter's lock."""
        pointers = [[address] for address in addresses(values)]
        outcomes, _ = self.headers.compare(b"".join(keys), pointers, codes)
        for view, value, outcome in zip(views, values, outcomes, strict=True):
            if outcome == Outcome.OK:
                payload = np.frombuffer(value, np.uint8, self.block_bytes)
                np.copyto(np.frombuffer(view, np.uint8), payload)
        return outcomes

    @abstractmethod
    async def get(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        """`read`, as outcomes. Corrupt objects may stay."""

    @abstractmethod
    async def put(self, keys: Keys, views: Views, expired: Expired) -> bytes:
        """`write`, as outcomes."""

    @abstractmethod
    async def remove_all(self) -> None:
        """`clear`, without the generation."""
