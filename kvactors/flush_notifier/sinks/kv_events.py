"""KV events over ZMQ, as vLLM's and SGLang's engines publish them and KV-aware routers read them.

Publishing is sending to ZMQ's queues, which never blocks. A reader that falls behind loses
messages, sees a gap in the sequence and asks for a replay (`kv_stream`), which begins with the
state if the gap is older than what is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink, SnapshotSource
from kvactors.flush_notifier.sinks.kv_sockets import Sockets
from kvactors.flush_notifier.sinks.kv_stream import (
    QUEUED_MESSAGES,
    DetailStream,
    EventStream,
    ReplayServer,
)
from kvactors.flush_notifier.sinks.kv_wire import KvEventEncoder
from kvactors.settings.sinks import KvEventsSinkConfig, of_rank

LINGER_S = 0.5  # seconds in which published messages may leave after the sink is closed
EARLIEST_TIME_S = 1_735_689_600  # the year 2025: a clock before that is not set


def first_number(numbers: str, name: str) -> int:
    """Number of a process's first batch. Rising numbers are the microseconds since 1970: above all
    of the process before, unless the clock was set back by about its running time."""
    if numbers == "from_zero":
        return 0
    now = time.time()
    if now < EARLIEST_TIME_S:
        get_logger().warning(
            "clock not set: readers may take the batches for old ones",
            sink=name,
            seconds_since_1970=round(now),
        )
    return max(0, int(now * 1e6))


class KvEventsSink(Sink):
    """Publishes every task as an event. The endpoints are the real ones, once open."""

    takes_clear = True
    by_name = True

    def __init__(self, config: KvEventsSinkConfig, block_size: int) -> None:
        super().__init__(config, block_size)
        self.config = config
        self.endpoint = of_rank(config.endpoint, config.dp_rank)
        self.replay_endpoint = of_rank(config.replay_endpoint, config.dp_rank)
        self.detail_endpoint = of_rank(config.detail_endpoint, config.dp_rank)
        self._encoder = KvEventEncoder(config, block_size)
        first = first_number(config.numbers, self.name)
        self.events = EventStream(config, self._encoder, first)
        self.details = DetailStream(config, first)
        self.server: ReplayServer | None = None
        self._sockets: Sockets | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._sockets = sockets = Sockets(self.name)
        config = self.config
        try:
            queued, bind = config.high_water_mark, config.bind
            socket = await sockets.publisher(self.endpoint, queued, bind)
            self.events.sender = sockets.sender(socket)
            self.endpoint = sockets.address(socket)
            if self.detail_endpoint:
                socket = await sockets.publisher(self.detail_endpoint, queued, bind)
                self.detail_endpoint = sockets.address(socket)
            self.details.sender = sockets.sender(socket)
            if self.replay_endpoint:
                router = await sockets.router(self.replay_endpoint, QUEUED_MESSAGES)
                self.replay_endpoint = sockets.address(router)
                five = config.replay == "five_frames"
                self.server = ReplayServer(router, self.events, with_topic=five)
                self._start(self.server.run())
        except BaseException:
            sockets.close()
            raise
        if sockets.exposed:
            get_logger().warning(
                "token ids of all prompts are published on every interface",
                sink=self.name,
                endpoints=sockets.exposed,
            )
        if config.heartbeat_s:
            self._start(self._publish_heartbeats(config.heartbeat_s))
        if config.snapshot_interval_s and self.details.topic:
            self._start(self._publish_snapshots(config.snapshot_interval_s))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def close(self) -> None:
        """Close the sockets. Published messages leave within LINGER_S, without a wait."""
        self.events.drop_state()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sockets is not None:
            self._sockets.close(LINGER_S)

    def set_snapshot_source(self, source: SnapshotSource) -> None:
        self.events.source = source

    async def begin_epoch(self, epoch: int) -> None:
        """Publish AllBlocksCleared, and the epoch on the second stream."""
        self.events.epoch = epoch
        self.events.publish([self._encoder.cleared])
        self.events.end_call(())
        self.details.publish(
            {"type": "Epoch", "epoch": epoch, "next_sequence": self.events.sequence}
        )

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        self.num_acknowledged = 0
        stream, whole = self.events, self._encoder.batch_of_tasks(time.time(), tasks)
        stream.begin_call(tasks)
        try:
            if whole is not None:
                self._publish(whole, tasks, len(tasks))
            else:
                await self._deliver_parts(tasks, self.config.max_blocks)
        finally:
            stream.end_call(tasks[: self.num_acknowledged])

    async def _deliver_parts(self, tasks: Sequence[FlushTask], max_blocks: int) -> None:
        """Publish tasks of more blocks than one batch takes."""
        events: list[bytes] = []
        sources: list[FlushTask] = []
        blocks = 0
        for done, task in enumerate(tasks):
            for event, size in self._encoder.events(task, max_blocks):
                if events and blocks + size > max_blocks:
                    self._publish(self.events.payload(events), sources, done)
                    await asyncio.sleep(0)
                    events, sources, blocks = [], [], 0
                events.append(event)
                sources.append(task)
                blocks += size
        if events:
            self._publish(self.events.payload(events), sources, len(tasks))

    def _publish(self, payload: bytes, sources: Sequence[FlushTask], done: int) -> None:
        """Publish one batch, its reasons on the second stream, and count the tasks complete."""
        self.events.send(payload)
        self.num_acknowledged = done
        if self.details.topic:
            number, reasons = self.events.sequence - 1, [task.reason.value for task in sources]
            self.details.publish({"type": "Reasons", "sequence": number, "reasons": reasons})

    async def _publish_heartbeats(self, interval: float) -> None:
        stream = self.events
        while True:
            number = stream.sequence
            await asyncio.sleep(interval)
            if stream.first < stream.sequence == number:
                stream.publish([])

    async def _publish_snapshots(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            self.events.hold()
            try:
                async for part in self.events.snapshot():
                    self.details.send(part)
            except Exception as error:
                get_logger().warning(
                    "snapshot failed", sink=self.name, error=f"{type(error).__name__}: {error}"
                )
            finally:
                self.events.release()
