"""The host tier's memory: a file in /dev/shm that scheduler and workers map.

vLLM's region names the file by the engine's id, which is new in every start, and removes it in an
orderly shutdown. After a kill -9 the file would keep its memory until a reboot. So every process
that maps a region holds a shared lock on a small file beside it, and the next engine on the machine
removes regions whose lock is free.

Two engines with one id would map the same rows and overwrite each other's chunks. So the process of
an engine's scheduler also holds a lock on the id, which a second engine does not get."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvactors.device.arena import pages_from
from kvactors.errors import ConfigError, DeviceError
from kvactors.integrations.vllm.settings import WHERE
from kvactors.native import fcntl
from kvactors.tier_cache import CopyWorker, SlotMemory

FOLDER = Path("/dev/shm")  # noqa: S108, the folder that vLLM's region uses
PREFIX = "kvactors_"

log = logging.getLogger("kvactors")


class TierRegion:
    """Rows of host memory in a file that several processes map, one row a chunk.

    Args:
        rank: of the worker; None in the scheduler's process.
        numa_node: the NUMA node that the rows come from, None for the system's choice. vLLM's
            region touches its pages when it is made, so each process needs the same one.
    """

    def __init__(
        self,
        engine_id: str,
        num_chunks: int,
        row_bytes: int,
        worker_bytes: int,
        rank: int | None,
        *,
        numa_node: int | None = None,
    ) -> None:
        name = PREFIX + engine_id
        self._shape = num_chunks, row_bytes
        self._slots: SlotMemory | None = None
        remove_stale_regions()
        self._lock_path = FOLDER / f"{name}.lock"
        self._claim_path = FOLDER / f"{name}.engine"
        self._claim = -1
        self._lock = _hold(self._lock_path, fcntl.LOCK_SH)
        try:
            if rank is None:
                self._claim = self._claim_id(engine_id)
            with pages_from(numa_node, f"{WHERE}: numa_node"):
                self.shared: Any = SharedOffloadRegion(
                    name, num_chunks, rank, row_bytes, worker_bytes
                )
        except BaseException:
            self._release()
            raise

    def _claim_id(self, engine_id: str) -> int:
        try:
            return _hold(self._claim_path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"engine_id {engine_id!r} of kv_transfer_config is that of a running engine on "
                "this machine: give each engine another one, or leave it out"
            ) from None

    def view(self) -> memoryview:
        return memoryview(self.shared.create_kv_memoryview()).cast("B")

    def slots(self) -> SlotMemory:
        """The rows as host slots, until `close`."""
        num_chunks, row_bytes = self._shape
        self._slots = self._slots or SlotMemory(num_chunks, row_bytes, self.view(), row_bytes)
        return self._slots

    def close(self) -> None:
        """Unmap the memory. The last process removes the file."""
        if self._lock < 0:
            return
        if self._slots is not None:
            self._slots.close()
        self.shared.cleanup()
        self._release()

    def _release(self) -> None:
        if self._claim >= 0:
            claim, self._claim = self._claim, -1
            self._claim_path.unlink(missing_ok=True)
            os.close(claim)
        lock, self._lock = self._lock, -1
        _remove_unused(lock, self._lock_path)
        os.close(lock)


def remove_stale_regions() -> int:
    """Remove the regions of engines that no process maps any more."""
    count = 0
    for path in FOLDER.glob(f"{PREFIX}*.lock"):
        with contextlib.suppress(OSError):  # removed by another process, or of another user
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                count += _remove_unused(lock, path)
            finally:
                os.close(lock)
    if count:
        log.warning("removed the host memory of %d engines that were killed", count)
    return count


def _hold(path: Path, kind: int) -> int:
    """Hold a lock on a file, and return its descriptor."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, kind)
        except OSError:
            os.close(lock)
            raise
        if _is_current(lock, path):
            return lock
        os.close(lock)  # another process removed it before the lock was taken


def _is_current(lock: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(lock).st_ino
    except OSError:
        return False


def _remove_unused(lock: int, path: Path) -> bool:
    """Remove a region and its lock unless another process holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    if not _is_current(lock, path):
        return False
    name = path.name.removesuffix(".lock")
    for file in (FOLDER / f"vllm_offload_{name}.mmap", FOLDER / f"{name}.engine"):
        with contextlib.suppress(OSError):
            file.unlink()
    path.unlink()
    return True


# -- The worker's side: copies between vLLM's cache tensors and the host tier.


class KVActorsWorker(OffloadingWorker):
    """vLLM's interface of a `CopyWorker`. A chunk is `blocks_per_chunk` blocks of one group of
    layers, one after another, each with the pages of all tensors. `stream` gives the handle of the
    stream that a copy comes after, on which vLLM's model reads and writes the blocks."""

    def __init__(
        self,
        copies: CopyWorker,
        blocks_per_chunk: int,
        region: Any,
        stream: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._copies = copies
        self._stream = stream
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        places = self._places(src_spec, dst_spec.block_ids)
        self._copies.submit_store(job_id, src_spec.block_ids, places, stream=self._stream())
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        places = self._places(dst_spec, src_spec.block_ids)
        self._copies.submit_load(job_id, dst_spec.block_ids, places, stream=self._stream())
        return True

    def _places(self, device: Any, chunks: Any) -> Any:
        """The place of each block, counted in blocks. The first of a group may be inside its
        chunk."""
        count, used, places = self._blocks_per_chunk, 0, []
        slots = np.asarray(chunks, np.int64)
        for index, blocks in zip(device.block_indices, device.group_sizes, strict=True):
            first = int(index) % count
            inside = np.arange(first, first + blocks)
            number = used + inside // count
            if blocks:
                used = int(number[-1]) + 1
            if used > len(slots):
                break
            places.append(slots[number] * count + inside % count)
        if used != len(slots):
            raise DeviceError(
                f"{tuple(device.group_sizes)} blocks of each group from blocks "
                f"{tuple(device.block_indices)} on are not {len(slots)} chunks of {count}"
            )
        return np.concatenate(places)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call. DeviceError if a copy of the GPU failed: vLLM
        has no result for that, and would compute with blocks that hold other bytes."""
        found = []
        for ended in self._copies.get_finished():
            if ended.error:
                way = "from" if ended.stored else "to"
                raise DeviceError(f"a copy {way} the GPU failed: {ended.error}")
            found.append(TransferResult(ended.job, True, ended.nbytes, ended.seconds))  # type: ignore[arg-type, unused-ignore]
        return found

    def wait(self, job_ids: set[int]) -> None:
        """Return when jobs have ended. DeviceError if a copy hangs: vLLM would reuse its blocks."""
        self._copies.finish(job_ids)

    def shutdown(self) -> None:
        self._copies.shutdown()
        self._region.close()
