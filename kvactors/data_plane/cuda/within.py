"""Copies between blocks of one GPU, within its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.cuda.driver import CudaError
from kvactors.device.regions import check_pairs
from kvactors.threads import Workers


class Lane(Protocol):
    """The parts of a lane that copies need."""

    device: Any
    workers: Workers

    def failed(self, error: BaseException) -> bool:
        """See `lane.Lane`."""


def copy_blocks(self: Any, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy every piece of block sources[j] to block targets[j], with one driver call per piece, and
    wait. ValueError, DeviceError, CudaError. self: a `CudaDevice`."""
    self.ensure_in_place()
    check_pairs(self, sources, targets)
    driver = self.driver
    pieces = list(zip(self.regions.tolist(), self.piece_bytes.tolist(), strict=True))
    with self.current():
        try:
            for source, target in zip(sources, targets, strict=True):
                for region, size in pieces:
                    to, of = region + target * size, region + source * size
                    driver.call("cuMemcpyDtoDAsync", to, of, size, self._stream)
            driver.call("cuStreamSynchronize", self._stream)
        except CudaError:  # a copy that was begun ends before the blocks are used again
            driver.settle(self.context, self._stream)
            raise


async def copied_within(
    lane: Lane,
    sources: Sequence[int],
    targets: Sequence[int],
    broke: Callable[[BaseException], None],
) -> tuple[int, ...]:
    """Copy in the thread of a lane, which waits for the GPU for microseconds. Returns the indices
    of pairs that did not arrive. broke: called with an error of the driver."""
    copies = lane.workers.submit(partial(lane.device.copy_blocks, sources, targets))
    try:
        await wait_uncancelled(asyncio.wrap_future(copies))
    except Exception as error:
        if lane.failed(error):
            broke(error)
        return tuple(range(len(sources)))
    return ()
