"""The interface to the CUDA streams of an engine: waits for copies, and events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kvactors.device_events import RecordedEvent
from kvactors.errors import DeviceError

NO_STREAMS = (
    "the device blocks are not in the memory of a GPU of this process, so CUDA streams are out of "
    "reach: pass an event, or wait for the stream before the call"
)


class EngineStreams(Protocol):
    """An engine's streams. A stream is given by the driver's handle."""

    def check_streams(self) -> None:
        """DeviceError if no stream of an engine can wait for loads, and no caller in its place."""

    def make_stream_wait(self, stream: int, blocks: Sequence[int], layer: int) -> bool:
        """Make a stream wait until one layer of copies in flight into device blocks has arrived.

        Args:
            stream: the driver's handle.
            blocks: device blocks.
            layer: counted from the layout's first.

        Returns:
            Whether it waits for all of the blocks. Otherwise its owner must wait in another way.

        Raises:
            DeviceError: the driver refused it.
        """

    def begin_stream_wait(self, stream: int, blocks: Sequence[int]) -> asyncio.Future[None] | None:
        """Make a stream wait for copies into device blocks, also for those that begin later.

        Args:
            stream: the driver's handle.
            blocks: device blocks.

        Returns:
            Done when the stream waits for the copies of all blocks, which is never for blocks that
            no copy in flight or later brings. Cancel it when it is not needed any more. Its
            exception is a DeviceError if the driver refuses. None: the owner of the stream must
            wait in another way.
        """

    def record_event(self, stream: int) -> RecordedEvent:
        """Record an event on a stream: it completes after the work put there so far.

        Raises:
            DeviceError: the device has no such streams, or the driver refused it.
        """


class StreamsOutOfReach:
    """Streams of other processes. Their owner waits for loads."""

    def check_streams(self) -> None:
        """See `EngineStreams`."""

    def make_stream_wait(self, stream: int, blocks: Sequence[int], layer: int) -> bool:
        """See `EngineStreams`."""
        return False

    def begin_stream_wait(self, stream: int, blocks: Sequence[int]) -> asyncio.Future[None] | None:
        """See `EngineStreams`."""
        return None

    def record_event(self, stream: int) -> RecordedEvent:
        """See `EngineStreams`."""
        raise DeviceError(NO_STREAMS)


OUT_OF_REACH = StreamsOutOfReach()
