"""Storage of v1: each worker reads and writes its rank's part of a block, in its host buffers, and
the scheduler's process looks blocks up and gives them host blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvactors.errors import CacheClosed, DeadlineExceeded, StoreError
from kvactors.integrations.fastdeploy.lower_tiers import MARGIN, log, tier_config
from kvactors.integrations.fastdeploy.settings import ManagerSettings
from kvactors.layout.base import Layout
from kvactors.tier_cache import SlotMemory, StorageResult, StorageTier
from kvactors.tier_cache.storage import make_storage


def open_rank_storage(
    settings: ManagerSettings, layout: Layout, rank: int, *, gives: bool = True
) -> StorageTier:
    """The store of one rank's parts of blocks. StoreError if it cannot be used. `gives`: whether
    this process gives memory to the pool."""
    storage = replace(settings.storage, rank=rank, ranks=settings.ranks)
    if storage.mooncake and not gives:
        storage = replace(storage, mooncake=dict(storage.mooncake) | {"global_segment_size": 0})
    num_slots = settings.cache.num_cpu_blocks
    config = tier_config(settings, layout, layout.block_bytes, num_slots, storage)
    tier = make_storage(config, environ={})  # the variables are read already
    tier.open(storage.open_timeout_s)
    return tier


@dataclass
class StorageMetadata:
    """Blocks to read or write, with the attributes of FastDeploy's `StorageMetadata`.

    Attributes:
        block_ids: host blocks.
        hash_values: as many names, in hex.
        timeout: seconds of the call.
        extra_params: of a read: `copies`, for each host block the number of copies to it and from
            it that the scheduler has issued. The read comes after them.
    """

    hash_values: list[str]
    block_ids: list[int]
    direction: str = "load"
    storage_type: str = ""
    endpoint: str | None = None
    timeout: float = 30.0
    layer_num: int = 0
    extra_params: dict[str, Any] = field(default_factory=dict)


class PendingPrefetch(NamedTuple):
    """A prefetch for every worker."""

    request_id: str
    metadata: StorageMetadata
    host_block_ids: list[int]


class StorageTask:
    """A read or a write of one worker, with the attributes of FastDeploy's `AsyncTaskHandler`."""

    def __init__(self, metadata: Any, blocks: Sequence[int]) -> None:
        self.blocks = list(blocks)
        self.keys = [bytes.fromhex(key) for key in metadata.hash_values]
        if len(self.blocks) != len(self.keys):
            raise ValueError(f"{len(self.blocks)} host blocks and {len(self.keys)} hashes")
        self._end: Future[list[int]] = Future()

    @property
    def is_completed(self) -> bool:
        return self._end.done()

    @property
    def result(self) -> list[int] | None:
        """The host blocks, when the bytes of all of them are there."""
        return self._end.result() if self.is_completed and not self.error else None

    @property
    def error(self) -> str | None:
        """Why bytes of some have not arrived. None while they may."""
        error = self._end.exception() if self.is_completed else None
        return None if error is None else str(error)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds. Returns whether it has come."""
        return bool(wait([self._end], timeout).done)

    def get_result(self) -> list[int]:
        """`result`, after a wait. StoreError with the `error`."""
        return self._end.result()

    def ended(self, ok: Sequence[bool]) -> None:
        if all(ok):
            self._end.set_result(self.blocks)
        else:
            self.fail(f"{ok.count(False)} of {len(ok)} blocks are not there")

    def fail(self, why: str) -> None:
        log.warning("host blocks not moved", blocks=len(self.blocks), reason=why)
        self._end.set_exception(StoreError(why))


class WorkerStorage:
    """Storage of one worker's host blocks. Calls come from the worker's thread.

    The scheduler's process gives a host block to a copy or to a read as soon as it has issued the
    copies that use the block. Reads reach a worker on another way than copies, so a read waits for
    its number of copies, and one that comes too late fails.

    Args:
        memories: host buffers, in the order of an object's bytes.
        copies: to and from each host block, counted by the caller.
        wait_for_copies: returns when the copies in flight have ended.
    """

    def __init__(
        self,
        tier: StorageTier,
        memories: Sequence[SlotMemory],
        copies: Counter[int],
        wait_for_copies: Callable[[], object],
    ) -> None:
        self.tier = tier
        self._memories = memories
        self._copies = copies
        self._wait_for_copies = wait_for_copies
        self._jobs: dict[int, Future[StorageResult]] = {}  # the last one of each host block
        self._numbers = count()
        self._reads: list[tuple[StorageTask, list[int]]] = []  # that wait for copies

    def make_way(self, blocks: Sequence[int]) -> None:
        """Wait until storage does not use host blocks any more. DeadlineExceeded if a call does not
        return."""
        jobs = {self._jobs[block] for block in blocks if block in self._jobs}
        if wait(jobs, self.tier.timeout + MARGIN).not_done:
            raise DeadlineExceeded("a call to storage does not return, and uses host blocks")

    def read(self, task: StorageTask, copies: Sequence[int]) -> None:
        if len(copies) != len(task.blocks):
            raise ValueError(f"{len(task.blocks)} host blocks and {len(copies)} numbers of copies")
        self._reads.append((task, list(copies)))
        self.begin_reads()

    def begin_reads(self) -> None:
        """Begin the reads whose copies were made."""
        for one in list(self._reads):
            task, copies = one
            found = [self._copies[block] for block in task.blocks]
            if found == copies:
                self._wait_for_copies()
                self.make_way(task.blocks)
                self._reads.remove(one)
                self._begin(self.tier.submit_load, task)
            elif any(made > number for made, number in zip(found, copies, strict=True)):
                self._reads.remove(one)
                task.fail("the host blocks were given to others meanwhile")

    def write(self, task: StorageTask) -> None:
        """Write host blocks whose copies have ended."""
        self._begin(self.tier.submit_store, task)

    def _begin(self, submit: Callable[..., Future[StorageResult]], task: StorageTask) -> None:
        views = [[one.view(block) for one in self._memories] for block in task.blocks]
        self.tier.poll()  # the ends reach the tasks
        try:
            job = submit(next(self._numbers), task.keys, views)
        except CacheClosed as error:
            task.fail(str(error))
            return
        job.add_done_callback(lambda job: task.ended(job.result().ok))
        self._jobs = {block: one for block, one in self._jobs.items() if not one.done()}
        self._jobs.update(dict.fromkeys(task.blocks, job))

    def give_up_reads(self) -> None:
        """Fail the reads that wait for copies."""
        for task, _ in self._reads:
            task.fail("storage is closed")
        self._reads.clear()
