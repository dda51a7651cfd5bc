"""The worker's side: copies between vLLM's cache tensors and the host tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvactors.errors import DeviceError
from kvactors.tier_cache import CopyWorker

WAIT = 600.0
"""Seconds within which a copy must end. Only a hang takes as long."""


class KVActorsWorker(OffloadingWorker):
    """vLLM's interface of a `CopyWorker`.

    A chunk is `blocks_per_chunk` blocks, one after another, each with the pages of all layers.

    Args:
        copies: the worker that copies.
        blocks_per_chunk: device blocks of a chunk.
        region: closed at `shutdown`.
        stream: the handle of the stream that a copy comes after, for tensors of a GPU. vLLM's
            model reads and writes the blocks on it.
    """

    def __init__(
        self,
        copies: CopyWorker,
        blocks_per_chunk: int,
        region: Any,
        stream: Callable[[], int] | None = None,
    ) -> None:
        self._copies = copies
        self._stream = stream
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy device blocks into chunks."""
        places = self._places(src_spec, dst_spec.block_ids)
        stream = None if self._stream is None else self._stream()
        self._copies.submit_store(job_id, src_spec.block_ids, places, stream=stream)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Begin to copy chunks into device blocks."""
        places = self._places(dst_spec, src_spec.block_ids)
        stream = None if self._stream is None else self._stream()
        self._copies.submit_load(job_id, dst_spec.block_ids, places, stream=stream)
        return True

    def _places(self, device: Any, chunks: Any) -> Any:
        """The place of each block of a job in the host tier, counted in blocks.

        Args:
            device: vLLM's `GPULoadStoreSpec`.
            chunks: indices of the chunks that hold the blocks, in order. The first block may be
                inside the first chunk.
        """
        count = self._blocks_per_chunk
        blocks = len(device.block_ids)
        first = int(device.block_indices[0]) % count
        if len(chunks) != -(-(first + blocks) // count):
            raise DeviceError(
                f"{blocks} blocks from block {first} of a chunk are not {len(chunks)} chunks of "
                f"{count}"
            )
        inside = np.arange(first, first + blocks)
        return np.asarray(chunks, np.int64)[inside // count] * count + inside % count

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call.

        Raises:
            DeviceError: a copy of the GPU failed. vLLM has no result for that, and would compute
                with blocks that hold other bytes.
        """
        found = []
        for ended in self._copies.get_finished():
            if ended.error:
                way = "from" if ended.stored else "to"
                raise DeviceError(f"a copy {way} the GPU failed: {ended.error}")
            found.append(TransferResult(ended.job, True, ended.nbytes, ended.seconds))  # type: ignore[arg-type, unused-ignore]
        return found

    def wait(self, job_ids: set[int]) -> None:
        """Return when jobs have ended.

        Raises:
            DeviceError: a copy hangs. vLLM would reuse its blocks.
        """
        if not self._copies.wait(job_ids, WAIT):
            raise DeviceError(f"a copy has not ended in {WAIT} s")

    def shutdown(self) -> None:
        """Let the copies end, and let go of the memory."""
        self._copies.shutdown()
        self._region.close()
