"""Payloads of a file store on their way into free slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvactors.storage.backends.base import Expired
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_lineage import (
    WritingLineages,
    fields_of_lineage,
    room_beside,
)
from kvactors.storage.backends.slab_objects import proved
from kvactors.storage.backends.slab_table import (
    SALT,
    WRITTEN_AT,
    blank_entries,
    blank_entry,
    checksum_of,
    mark_of,
)
from kvactors.storage.backends.slab_threads import SlabThreads
from kvactors.storage.backends.slots import Slots
from kvactors.storage.messages import Outcome


class SlabWrites:
    """Writes payloads and makes their table entries, which another call writes later.

    Attributes:
        lineages: of the objects that are being written.
        sequence: number of the next write.
    """

    def __init__(
        self,
        files: SlabFiles,
        threads: SlabThreads,
        slots: Slots,
        salt_of: Callable[[bytes], int | None],
    ) -> None:
        """salt_of: the number of the salt of an object that is being written, None if it is not to
        be kept."""
        self.lineages = WritingLineages()
        self.sequence = 0
        self._files = files
        self._threads = threads
        self._slots = slots
        self._salt_of = salt_of

    async def write(
        self,
        keys: Sequence[bytes],
        data: Sequence[memoryview],
        slots: Sequence[int],
        generation: int,
        expired: Expired,
    ) -> list[tuple[Outcome, bytes]]:
        """Write payloads to slots.

        Returns:
            An outcome and the entry of each. CORRUPT: the slot held a corrupt object before, and
            does not return the data written to it.
        """
        blanks = self._blanks(keys, generation)
        outcomes, records = await self._threads.io.write(slots, data, blanks, expired)
        size = self._files.meta.entry_bytes
        found = [
            (outcome, records[n * size : (n + 1) * size]) for n, outcome in enumerate(outcomes)
        ]
        if not self._slots.suspects:
            return found
        for n, slot in enumerate(slots):
            outcome, entry = found[n]
            if outcome == Outcome.OK and slot in self._slots.suspects:
                checksum = checksum_of(mark_of(entry))
                if await self._threads.run(proved, self._files, slot, checksum):
                    self._slots.passed(slot)
                else:
                    found[n] = Outcome.CORRUPT, entry
        return found

    def _blanks(self, keys: Sequence[bytes], generation: int) -> list[bytes]:
        meta, sequence = self._files.meta, self.sequence
        self.sequence += len(keys)
        moment = {WRITTEN_AT: (time.time_ns() // 1000).to_bytes(8, "little")}
        lineages = [self.lineages.get(key) for key in keys]
        salts = [self._salt_of(key) for key in keys]
        if not any(lineages) and len(set(salts)) == 1:
            fields = _with_salt(moment, salts[0])
            return blank_entries(meta, keys, sequence, generation, fields)
        found = []
        for n, (key, lineage) in enumerate(zip(keys, lineages, strict=True)):
            inputs = fields_of_lineage(lineage, room_beside(meta, moment))
            fields = {**moment, **inputs} if inputs else _with_salt(moment, salts[n])
            found.append(blank_entry(meta, key, sequence + n, generation, fields))
        return found


def _with_salt(fields: Mapping[int, bytes], salt: int | None) -> Mapping[int, bytes]:
    return fields if salt is None else {**fields, SALT: salt.to_bytes(8, "little")}
