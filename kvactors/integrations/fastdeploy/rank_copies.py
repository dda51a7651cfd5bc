"""Copies between device blocks and host slots, for the tensors of one rank or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from kvactors.errors import DeviceError
from kvactors.tier_cache import CopyWorker, SlotMemory

WAIT = 600.0
"""Seconds within which a copy must end. Only a hang takes as long."""


class RankCopies:
    """Copies whole blocks, and returns when they have ended. A slot has the bytes of rank 0, then
    those of rank 1, and so on. One call at a time.

    Args:
        ranks: the tensors of each rank, in the order of their bytes.
        memory: the host slots.
        threads: copying threads for each rank, for tensors in host memory.
        stream: gives the handle of the GPU stream that a copy comes after, None for tensors in host
            memory.

    Attributes:
        num_blocks: device blocks that every tensor has.
        block_bytes: bytes of a block, of all ranks together.

    Raises:
        DeviceError: a tensor cannot be copied.
        LayoutError: the tensors have different numbers of blocks, or a block does not fit in a
            slot.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[Any]],
        memory: SlotMemory,
        *,
        threads: int,
        stream: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._stream = stream
        self._jobs = count()
        self._workers: list[CopyWorker] = []
        self.block_bytes = 0
        try:
            for tensors in ranks:
                one = CopyWorker(tensors, memory, offset=self.block_bytes, threads=threads)
                self._workers.append(one)
                self.block_bytes += one.block_bytes
        except BaseException:
            self.close()
            raise
        self.num_blocks = min(one.num_blocks for one in self._workers)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> str:
        """Copy device blocks to host slots.

        Returns:
            Why bytes did not arrive, empty if all of them did.

        Raises:
            DeviceError: a copy does not end. Blocks and slots are still in use.
        """
        return self._move(blocks, slots, to_host=True)

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> str:
        """Copy host slots to device blocks. See `store`."""
        return self._move(blocks, slots, to_host=False)

    def _move(self, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool) -> str:
        job, errors = next(self._jobs), []
        begun: list[CopyWorker] = []
        for one in self._workers:
            submit = one.submit_store if to_host else one.submit_load
            try:
                submit(job, blocks, slots, stream=self._stream())
            except Exception as error:  # of the engine's function too: this copy has not begun
                errors.append(repr(error))
                break
            begun.append(one)
        for one in begun:
            if not one.wait([job], WAIT):
                raise DeviceError(f"a copy of {len(blocks)} blocks has not ended in {WAIT} s")
            errors += [ended.error for ended in one.get_finished() if ended.error]
        return "; ".join(errors)

    def close(self) -> bool:
        """Release tensors and memory. Returns whether all copies have ended."""
        ended = [one.shutdown() for one in self._workers]
        return all(ended)
