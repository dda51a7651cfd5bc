"""Writes of finished requests to storage, in the engine's finish thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue
from typing import NamedTuple

from kvactors.actor.log import get_logger
from kvactors.errors import CacheClosed, DeviceError
from kvactors.integrations.fastdeploy.rank_copies import RankCopies
from kvactors.tier_cache import SlotMemory, StorageResult, StorageTier

log = get_logger()

MARGIN = 5.0
"""Seconds that a job may take beyond the storage tier's time-out: it ends itself before."""


class Staging(NamedTuple):
    """Host slots that device blocks pass on their way to storage.

    Attributes:
        memory: the slots.
        copies: between device blocks and them.
    """

    memory: SlotMemory
    copies: RankCopies


class WriteCounters(NamedTuple):
    """Blocks of finished requests since the start.

    Attributes:
        written: written to storage.
        present: stored before.
        failed: not taken by storage.
    """

    written: int = 0
    present: int = 0
    failed: int = 0


class FinishWrites:
    """Copies the blocks of finished requests to staging slots, and saves them. Calls come from any
    threads: each takes the staging slots, and the next one waits for them.

    Args:
        storage: the storage tier.
        staging: the staging slots.
        wait_s: seconds that a call waits for the staging slots of others.
    """

    def __init__(self, storage: StorageTier, staging: Staging, wait_s: float) -> None:
        self._storage = storage
        self._staging = staging
        self._wait_s = wait_s
        self._ready: SimpleQueue[Staging | None] = SimpleQueue()  # None: writes have stopped
        self._ready.put(staging)
        self._jobs = count()
        self.counters = WriteCounters()

    def write(
        self, keys: Sequence[bytes], blocks: Sequence[int], wanted: Callable[[], bool]
    ) -> int:
        """Save blocks that storage lacks. Returns after the last write has ended.

        Failures are counted and logged, and never raised: the request has its answer.

        Args:
            keys: block hashes.
            blocks: as many device blocks, which nothing changes before the call returns.
            wanted: whether to go on, asked before each batch.

        Returns:
            Blocks that storage has now.
        """
        try:
            staging = self._ready.get(timeout=self._wait_s)
        except Empty:
            self._count(failed=len(keys))
            log.error("blocks not written: staging slots in use", blocks=len(keys))
            return 0
        if staging is None:
            self._ready.put(None)
            self._count(failed=len(keys))
            return 0
        free = True
        try:
            return self._write(keys, blocks, staging, wanted)
        except (TimeoutError, DeviceError) as error:
            free = False  # a copy or the store may still access the slots
            staging.memory.keep()
            log.error("writes to storage have stopped", error=str(error))
        except CacheClosed:
            log.warning("blocks not written: storage is closed", blocks=len(keys))
        finally:
            self._ready.put(staging if free else None)
        self._count(failed=len(keys))
        return 0

    def _write(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        staging: Staging,
        wanted: Callable[[], bool],
    ) -> int:
        stored = self._stored(keys)
        lacking = [
            (key, block) for key, block in zip(keys, blocks, strict=True) if key not in stored
        ]
        size, written = staging.memory.num_slots, 0
        for start in range(0, len(lacking), size):
            if not wanted():
                break
            some = lacking[start : start + size]
            slots = range(len(some))
            error = staging.copies.store([block for _, block in some], slots)
            if error:
                log.error("blocks not copied for storage", blocks=len(some), error=error)
                break
            views = [staging.memory.view(slot) for slot in slots]
            job = ("finish", next(self._jobs))
            result = self._ended(self._storage.submit_store(job, [key for key, _ in some], views))
            written += sum(result.ok)
            if not all(result.ok):
                break  # a block without those before it cannot be matched
        self._count(written, len(keys) - len(lacking), len(lacking) - written)
        return len(keys) - len(lacking) + written

    def _stored(self, keys: Sequence[bytes]) -> set[bytes]:
        """The keys that storage has."""
        if self._storage.lists:
            return {key for key in keys if self._storage.contains(key)}
        result = self._ended(self._storage.submit_lookup(("find", next(self._jobs)), keys))
        return {key for key, ok in zip(keys, result.ok, strict=True) if ok}

    def _ended(self, job: Future[StorageResult]) -> StorageResult:
        return job.result(self._storage.timeout + MARGIN)

    def _count(self, written: int = 0, present: int = 0, failed: int = 0) -> None:
        now = self.counters
        self.counters = WriteCounters(
            now.written + written, now.present + present, now.failed + failed
        )

    def close(self) -> None:
        """Release the staging slots, after `write` has returned."""
        self._staging.copies.close()
        self._staging.memory.close()
