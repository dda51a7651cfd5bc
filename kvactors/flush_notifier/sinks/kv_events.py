"""KV events over ZMQ: what vLLM's and SGLang's engines publish, and KV-aware routers read.

Publishing is sending to ZMQ's own queues, which never waits; a reader that falls behind loses messages, sees a gap in the sequence and
asks for a replay (`kv_replay`), or for a snapshot if the gap is older than what is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvactors.actor.log import get_logger
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.runs import Holding
from kvactors.flush_notifier.sinks.base import Holdings, Sink
from kvactors.flush_notifier.sinks.kv_replay import QUEUED, ReplayServer, Window
from kvactors.flush_notifier.sinks.kv_sockets import Sockets, send
from kvactors.flush_notifier.sinks.kv_wire import Dialect, Event, encode_batch
from kvactors.sink_config import KvEventsSinkConfig
from kvactors.units import Tier
from kvactors.zmq_endpoint import of_rank

LINGER = 0.5
"""Seconds in which what was published may leave after the sink is closed."""
SNAPSHOT_BLOCKS = 256
"""Blocks in a part of a snapshot."""


class KvEventsStatistics(NamedTuple):
    """A moment's picture. sequence: number of the next batch. requests, malformed: to the replay socket. given_up: requests of readers that
    were gone or too slow."""

    sequence: int
    detail_sequence: int
    kept_bytes: int
    requests: int
    given_up: int
    malformed: int


class KvEventsSink(Sink):
    """endpoint, replay_endpoint: where it really is, once open."""

    takes_clear = True
    by_name = True

    def __init__(self, config: KvEventsSinkConfig, block_size: int) -> None:
        super().__init__(config, block_size)
        self.config = config
        self.endpoint = of_rank(config.endpoint, config.dp_rank)
        self.replay_endpoint = of_rank(config.replay_endpoint, config.dp_rank)
        self.detail_endpoint = of_rank(config.detail_endpoint, config.dp_rank)
        self.epoch = 0
        self.sequence = self.detail_sequence = 0
        self._dialect = Dialect.of(config, block_size)
        self._topic = config.topic.encode()
        self._detail_topic = config.detail_topic.encode()
        self._window = Window(config.replay_window, config.replay_bytes)
        self._confirmed = 0  # all batches before this number are in what the ledger says this sink was told
        self._holdings: Holdings = lambda: iter(())
        self._sockets: Sockets | None = None
        self._socket: Any = None
        self._detail: Any = None
        self._server: ReplayServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Open the sockets. SinkError if an endpoint cannot be had."""
        self._sockets = sockets = Sockets(self.name)
        config = self.config
        try:
            self._socket = await sockets.publisher(self.endpoint, config.high_water_mark, config.bind)
            self.endpoint = sockets.address(self._socket)
            self._detail = self._socket
            if self.detail_endpoint:
                self._detail = await sockets.publisher(self.detail_endpoint, config.high_water_mark, config.bind)
                self.detail_endpoint = sockets.address(self._detail)
            if self.replay_endpoint:
                router = await sockets.router(self.replay_endpoint, QUEUED)
                self.replay_endpoint = sockets.address(router)
                five = config.replay == "five_frames"
                self._server = ReplayServer(router, self._window, self._topic, self.snapshot, with_topic=five)
                self._start(self._server.run())
        except BaseException:
            sockets.close()
            raise
        if sockets.exposed:
            get_logger().warning(
                "token ids of all prompts are published on every interface", sink=self.name, endpoints=sockets.exposed
            )
        if config.snapshot_interval and self._detail_topic:
            self._start(self._publish_snapshots(config.snapshot_interval))

    def _start(self, work: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def close(self) -> None:
        """Close the sockets; what was published leaves within LINGER seconds, without anybody waiting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sockets is not None:
            self._sockets.close(LINGER)

    def attach(self, holdings: Holdings) -> None:
        """See `Sink.attach`."""
        self._holdings = holdings

    async def begin(self, epoch: int) -> None:
        """A life begins with nothing: AllBlocksCleared, then the epoch on the second topic."""
        self.epoch = epoch
        self._publish([self._dialect.cleared()])
        self._confirmed = self.sequence
        self._tell_detail({"type": "Epoch", "epoch": epoch, "next_sequence": self.sequence})

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """Publish tasks as events; batches of at most `max_blocks` blocks."""
        self._confirmed = self.sequence
        for i, (events, reasons) in enumerate(batches(tasks, self._dialect, self.config.max_blocks)):
            if i:
                await asyncio.sleep(0)
            number = self.sequence
            self._publish(events)
            if self._detail_topic:
                self._tell_detail({"type": "Reasons", "sequence": number, "reasons": reasons})

    def _publish(self, events: Sequence[Event]) -> None:
        payload = encode_batch(time.time(), events, self.config.dp_rank)
        self._window.add(self.sequence, payload)
        send(self._socket, self._topic, self.sequence, payload)
        self.sequence += 1

    def _tell_detail(self, record: dict[str, Any]) -> None:
        if self._detail_topic:
            payload = encode_batch(time.time(), [record], self.config.dp_rank)
            send(self._detail, self._detail_topic, self.detail_sequence, payload)
            self.detail_sequence += 1

    # -- snapshots

    async def snapshot(self) -> AsyncIterator[bytes]:
        """Parts of a snapshot, each a payload of one record. A reader forgets what it knew, takes every part, then every batch from
        `next_sequence` on. What changed while the parts were made may be in both, so it keeps sets of blocks, not counts."""
        next_sequence, number = self._confirmed, 0
        for events in chunks(stored_of(self._holdings(), self._dialect), SNAPSHOT_BLOCKS):
            yield self._part(next_sequence, number, events, last=False)
            number += 1
            await asyncio.sleep(0)
        yield self._part(next_sequence, number, [], last=True)

    def _part(self, next_sequence: int, number: int, events: Sequence[Event], *, last: bool) -> bytes:
        record = {
            "type": "Snapshot", "epoch": self.epoch, "next_sequence": next_sequence, "part": number, "last": last, "events": events,
        }  # fmt: skip
        return encode_batch(time.time(), [record], self.config.dp_rank)

    async def _publish_snapshots(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            async for part in self.snapshot():
                send(self._detail, self._detail_topic, self.detail_sequence, part)
                self.detail_sequence += 1

    def statistics(self) -> KvEventsStatistics:
        """A moment's picture."""
        server = self._server
        counts = (server.requests, server.given_up, server.malformed) if server is not None else (0, 0, 0)
        return KvEventsStatistics(self.sequence, self.detail_sequence, self._window.held, *counts)


def batches(tasks: Iterable[FlushTask], dialect: Dialect, max_blocks: int) -> Iterator[tuple[list[Event], list[str]]]:
    """Tasks as batches of events, with the reason of each event."""
    events: list[Event] = []
    reasons: list[str] = []
    blocks = 0
    for task in tasks:
        for event in dialect.events(task, max_blocks):
            size = len(getattr(event, "block_hashes", ()))
            if events and blocks + size > max_blocks:
                yield events, reasons
                events, reasons, blocks = [], [], 0
            events.append(event)
            reasons.append(task.reason.value)
            blocks += size
    if events:
        yield events, reasons


def stored_of(holdings: Iterable[Holding], dialect: Dialect) -> Iterator[Event]:
    """One BlockStored for each block and tier."""
    for held in holdings:
        for tier in Tier:
            if held.tiers & tier:
                yield dialect.stored_event(held.key, held.parent, held.tokens, tier, held.position, held.origin)


def chunks(events: Iterable[Event], size: int) -> Iterator[list[Event]]:
    """Lists of at most `size`."""
    chunk: list[Event] = []
    for event in events:
        chunk.append(event)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
