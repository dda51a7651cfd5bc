"""A Mooncake pool as storage: every node of the pool can load the objects of every other node.

An object is one immutable value: a block's payload and a header. The pool belongs to all its nodes,
and its master evicts objects, so this back end lists no keys and reports none to indexes. An object
that is not there is a miss.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from kvactors.actor.log import get_logger
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.lineage import Lineage
from kvactors.settings.mooncake import MooncakeConfig, largest_registration
from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.backends.header import HEADER
from kvactors.storage.backends.mooncake_client import MooncakeClient
from kvactors.storage.backends.mooncake_headers import PoolHeaders
from kvactors.storage.backends.mooncake_objects import MooncakeObjects
from kvactors.storage.backends.mooncake_presence import PoolPresence
from kvactors.storage.backends.mooncake_registration import Registration
from kvactors.storage.backends.views import move_fitting
from kvactors.storage.messages import Outcome

log = get_logger()


class MooncakeBackend(Backend):
    """A client of a pool.

    Args:
        config: how the pool is joined.
        identity: of the objects. Those of different models, namespaces, layouts or ranks have
            different names and headers.
        block_bytes: size of a block.
    """

    slot_trailer_bytes = HEADER.size

    def __init__(self, config: MooncakeConfig, identity: StoreIdentity, block_bytes: int) -> None:
        super().__init__(identity.digest, block_bytes)
        self._prefix = identity.pool_prefix
        self.client = MooncakeClient(config, identity.rank)
        self._registration = Registration(self.client, largest_registration(os.environ))
        headers = PoolHeaders(identity.digest, block_bytes, config.payload_checksums)
        self.objects = MooncakeObjects(self.client, self._prefix, headers, block_bytes)
        self._presence = PoolPresence(self.client, self.objects.name, self.counters)

    async def open(self) -> None:
        """See `Backend.open`. Joins the pool."""
        await self.client.open()
        if not self.client.config.payload_checksums:
            log.warning("payload checksums are off", store="mooncake")
        if self.client.config.protocol == "tcp":
            log.info("pool over TCP", store="mooncake", rdma="storage.mooncake.protocol = 'rdma'")

    async def attach(self, arena: Arena) -> None:
        """See `Backend.attach`. Registers the arena."""
        await self._registration.add(arena)
        self.objects.arena = arena

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """See `Backend.probe`. None: only the master can answer."""
        return None

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`."""
        return await self._presence.run(keys, expired)

    async def ask_each(self, keys: Sequence[bytes], expired: Expired) -> list[bool]:
        """See `presence.ask_each`."""
        return await self._presence.each(keys, expired)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`. Corrupt objects are removed from the pool."""
        move = partial(self.objects.read, expired=expired)
        outcomes = await move_fitting(keys, views, self.block_bytes, move, writable=True)
        return await self._read_report(keys, bytes(outcomes))

    async def read_slots(
        self, keys: Sequence[bytes], arena: Arena, slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """See `Backend.read_slots`. Views of slots would cost as much as small objects."""
        if not self.objects.has_slots(arena, slots, len(keys)):
            return await super().read_slots(keys, arena, slots, expired)
        outcomes = await self.objects.read_slots(keys, slots, expired)
        return await self._read_report(keys, bytes(outcomes))

    async def _read_report(self, keys: Sequence[bytes], outcomes: bytes) -> ReadReport:
        if Outcome.CORRUPT in outcomes:
            results = zip(keys, outcomes, strict=True)
            await self.remove([key for key, outcome in results if outcome == Outcome.CORRUPT])
        refused = self.objects.take_without_checksum()
        if refused:
            self.counters.without_checksum += refused
            log.warning("objects without checksums", store="mooncake", objects=refused)
        return ReadReport(outcomes, [])

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`."""
        move = partial(self.objects.write, expired=expired)
        outcomes = await move_fitting(keys, views, self.block_bytes, move, writable=False)
        return WriteReport(bytes(outcomes), [])

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Arena,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        """See `Backend.write_slots`."""
        if not self.objects.has_slots(arena, slots, len(keys)):
            return await super().write_slots(keys, arena, slots, expired)
        return WriteReport(bytes(await self.objects.write_slots(keys, slots, expired)), [])

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`."""
        if keys:
            await self.client.remove([self.objects.name(key) for key in keys])

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`. Clears the objects of every node of the pool."""
        pattern = "^" + self._prefix
        if await self.client.call(lambda store: int(store.remove_by_regex(pattern, True)), -1) < 0:
            raise StoreError("the Mooncake pool did not remove the objects")
        self.generation = max(self.generation + 1, generation)

    async def close(self) -> None:
        """See `Backend.close`. Leaves the pool, which loses the objects in this node's memory."""
        await self._registration.remove()
        await self.client.close()
        self.objects.close()
