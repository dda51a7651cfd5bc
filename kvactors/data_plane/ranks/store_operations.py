"""The leader's operations on the store of a rank."""

from __future__ import annotations

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.data_plane.local import LocalPlane
from kvactors.data_plane.ranks.protocol import Answer, StoreObjects
from kvactors.errors import StoreError
from kvactors.storage.backends.base import ReadReport, WriteReport
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.messages import Outcome
from kvactors.types import join_hashes, split_hashes

log = get_logger()


class StoreOperations:
    """Carries operations out.

    Args:
        plane: the rank's arena and store.
        rank: the rank's number, for logs.
    """

    def __init__(self, plane: LocalPlane, rank: int) -> None:
        self._plane = plane
        self._rank = rank
        self._without_checksum = 0  # misses in earlier answers
        self._new_without_checksum()

    async def answer(self, message: StoreObjects) -> Answer:
        """Carry an operation out. A failure of the store is an outcome of the answer."""
        store = self._plane.store
        if message.kind in ("begin_paths", "paths"):
            return await _next_paths(store, message)
        keys = split_hashes(message.keys)
        try:
            outcomes, gone = await self._carry_out(store, message, keys)
        except StoreError as error:
            log.error("clear failed", rank=self._rank, error=str(error))
            count = 1 if message.kind == "clear" else len(keys)
            outcomes, gone = bytes([Outcome.UNAVAILABLE]) * count, []
        return Answer(
            message.op,
            outcomes,
            join_hashes(gone),
            without_checksum=self._new_without_checksum(),
        )

    def _new_without_checksum(self) -> int:
        counters = getattr(self._plane.backend, "counters", None)  # of other packages: maybe none
        before = self._without_checksum
        self._without_checksum = getattr(counters, "without_checksum", before)
        return self._without_checksum - before

    async def _carry_out(
        self, store: CheckedBackend | None, message: StoreObjects, keys: list[bytes]
    ) -> tuple[bytes, list[bytes]]:
        """Outcomes, and keys that the store does not hold any more."""
        until = now() + message.seconds
        if message.kind == "clear":
            if store is not None:
                await store.clear(message.generation)
            return bytes([Outcome.OK]), []
        if store is None:
            return bytes([Outcome.UNAVAILABLE]) * len(keys), []
        if message.kind in ("read", "write"):
            report: ReadReport | WriteReport
            slots, arena = message.slots, self._plane.arena
            if message.kind == "read":
                report = await store.read_slots(keys, arena, slots, lambda: now() >= until)
                gone = report.gone
            else:
                report = await store.write_slots(
                    keys, arena, slots, lambda: now() >= until, message.lineages
                )
                gone = report.evicted
            # With keys that left outside of batches, a page at a time.
            gone = [*gone, *store.inventory.take_removed()]
            return bytes(report.outcomes), [key for key in gone if not store.holds(key)]
        if message.kind == "ask":
            found = store.probe(keys)
            found = await store.ask(keys, lambda: now() >= until) if found is None else found
            absent = Outcome.UNAVAILABLE if store.attempts.lookups.failing else Outcome.MISS
            return bytes([Outcome.OK]) * found + bytes([absent]) * (len(keys) - found), []
        await store.remove(keys)
        return bytes(len(keys)), []


async def _next_paths(store: CheckedBackend | None, message: StoreObjects) -> Answer:
    """The next parts of the paths that the objects form; MISS at the end."""
    if store is None:
        return Answer(message.op, bytes([Outcome.MISS]))
    if message.kind == "begin_paths":
        store.begin_paths()
    parts = await store.next_paths(message.most)
    return Answer(
        message.op, bytes([Outcome.MISS if parts is None else Outcome.OK]), paths=tuple(parts or ())
    )
