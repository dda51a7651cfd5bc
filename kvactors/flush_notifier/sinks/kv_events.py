"""KV events over ZMQ: what vLLM's and SGLang's engines publish, and KV-aware routers read.

Publishing is sending to ZMQ's own queues, which never waits. A reader that falls behind loses
messages, sees a gap in the sequence and asks for a replay (`kv_replay`), which begins with the
state (`kv_state`) if the gap is older than what is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvactors.actor.log import get_logger
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Holdings, Sink
from kvactors.flush_notifier.sinks.kv_replay import QUEUED, ReplayServer, Window
from kvactors.flush_notifier.sinks.kv_sockets import Sockets, send
from kvactors.flush_notifier.sinks.kv_state import Changes, State, StateMaker
from kvactors.flush_notifier.sinks.kv_wire import Dialect, Event, encode_batch
from kvactors.sink_config import KvEventsSinkConfig
from kvactors.zmq_endpoint import of_rank

LINGER = 0.5
"""Seconds in which what was published may leave after the sink is closed."""
CLOCK_SET = 1_735_689_600
"""Seconds from 1970 to 2025: a clock before that has not been set."""


class KvEventsStatistics(NamedTuple):
    """A moment's picture. sequence: number of the next batch. published: batches of this process.
    requests, malformed: to the replay socket. given_up: requests of readers that were gone or too
    slow. states: how often the whole state was made for a replay or a snapshot."""

    sequence: int
    published: int
    detail_sequence: int
    kept_bytes: int
    requests: int
    given_up: int
    malformed: int
    states: int


def first_number(numbers: str, name: str) -> int:
    """Number of a process's first batch.

    Numbers that rise are the microseconds since 1970. They are above all numbers of the process
    before if that published less than a batch every microsecond on average since its start and if
    the clock has not gone back by about as long as it ran.
    """
    if numbers == "from_zero":
        return 0
    now = time.time()
    if now < CLOCK_SET:
        get_logger().warning(
            "the clock is not set: readers may take the batches for old ones",
            sink=name,
            seconds_since_1970=round(now),
        )
    return max(0, int(now * 1e6))


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
        self.first = self.sequence = self.detail_sequence = first_number(config.numbers, self.name)
        self.fill = config.numbers == "from_zero"
        self.topic = config.topic.encode()
        self.window = Window(config.replay_window, config.replay_bytes)
        self._dialect = Dialect.of(config, block_size)
        self._detail_topic = config.detail_topic.encode()
        self._last: Sequence[
            FlushTask
        ] = ()  # published by the last call: the ledger may not count it as delivered yet
        self._call: Sequence[FlushTask] | None = None  # tasks of the call in progress
        self._call_from = 0  # number of the first batch of that call
        self._changes: list[Changes] = []  # of the states that are being made
        self._readers = 0
        self._holdings: Holdings = _nothing
        self._states = StateMaker(
            self._begin_state, self._end_state, lambda: self._holdings, self._kept, self._dialect
        )
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
            self._socket = await sockets.publisher(
                self.endpoint, config.high_water_mark, config.bind
            )
            self.endpoint = sockets.address(self._socket)
            self._detail = self._socket
            if self.detail_endpoint:
                self._detail = await sockets.publisher(
                    self.detail_endpoint, config.high_water_mark, config.bind
                )
                self.detail_endpoint = sockets.address(self._detail)
            if self.replay_endpoint:
                router = await sockets.router(self.replay_endpoint, QUEUED)
                self.replay_endpoint = sockets.address(router)
                five = config.replay == "five_frames"
                self._server = ReplayServer(router, self, with_topic=five)
                self._start(self._server.run())
        except BaseException:
            sockets.close()
            raise
        if sockets.exposed:
            get_logger().warning(
                "token ids of all prompts are published on every interface",
                sink=self.name,
                endpoints=sockets.exposed,
            )
        if config.heartbeat:
            self._start(self._publish_heartbeats(config.heartbeat))
        if config.snapshot_interval and self._detail_topic:
            self._start(self._publish_snapshots(config.snapshot_interval))

    def _start(self, work: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def close(self) -> None:
        """Close the sockets; what was published leaves within LINGER seconds, without anybody
        waiting."""
        self._states.release()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sockets is not None:
            self._sockets.close(LINGER)

    def attach(self, holdings: Holdings) -> None:
        """See `Sink.attach`."""
        self._holdings = holdings

    async def begin(self, epoch: int) -> None:
        """AllBlocksCleared, then the epoch on the second topic: what was published before is
        void."""
        self.epoch = epoch
        self._publish([self._dialect.cleared()])
        self._last = ()
        self._tell_detail({"type": "Epoch", "epoch": epoch, "next_sequence": self.sequence})

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """Publish tasks as events; batches of at most `max_blocks` blocks."""
        self.taken = 0
        self._call, self._call_from = tasks, self.sequence
        self._keep()
        for changes in self._changes:
            changes.note(tasks)
        try:
            for events, sources, done in batches(tasks, self._dialect, self.config.max_blocks):
                if self.sequence != self._call_from:
                    await asyncio.sleep(0)
                number = self.sequence
                self._publish(events)
                self.taken = done
                if self._detail_topic:
                    self._tell_detail(
                        {
                            "type": "Reasons",
                            "sequence": number,
                            "reasons": [task.reason.value for task in sources],
                        }
                    )
        finally:
            self._last, self._call = tasks[: self.taken], None
            self._keep()

    def _keep(self) -> None:
        """What the window must keep: the batches of the call in progress, and those that follow a
        state that readers are sent."""
        self.window.needed = (
            self._states.number if self._call is None else min(self._states.number, self._call_from)
        )

    def _publish(self, events: Sequence[Event]) -> None:
        payload = encode_batch(time.time(), events, self.config.dp_rank)
        self.window.add(self.sequence, payload)
        send(self._socket, self.topic, self.sequence, payload)
        self.sequence += 1

    def _tell_detail(self, record: dict[str, Any]) -> None:
        if self._detail_topic:
            payload = encode_batch(time.time(), [record], self.config.dp_rank)
            send(self._detail, self._detail_topic, self.detail_sequence, payload)
            self.detail_sequence += 1

    async def _publish_heartbeats(self, interval: float) -> None:
        while True:
            number = self.sequence
            await asyncio.sleep(interval)
            if self.first < self.sequence == number:
                self._publish([])

    # -- the state, for readers that lack more than is kept

    def _begin_state(self) -> tuple[int, Changes]:
        """The number of a state that is made now, and what to correct in the ledger's view for
        it."""
        if self._call is None:
            number, changes = self.sequence, Changes(self._last)
        else:  # what the call before this one published is delivered
            number, changes = self._call_from, Changes(())
            changes.note(self._call)
        self._changes.append(changes)
        self._states.number = number
        self._keep()
        return number, changes

    def _end_state(self, changes: Changes) -> None:
        self._changes.remove(changes)

    def _kept(self, number: int) -> bool:
        return number >= self.window.first or number == self.sequence

    async def state(self) -> State:
        """The state at a number from which on every batch is kept."""
        return await self._states.state()

    def hold(self) -> None:
        """A reader is being answered: a state that is made for it is kept."""
        self._readers += 1

    def release(self) -> None:
        """One reader less. Without any the window keeps no more than it is configured for."""
        self._readers -= 1
        if not self._readers:
            self._states.release()
            self._keep()

    def payloads(self, state: State, most: int) -> Iterator[bytes]:
        """See `State.payloads`."""
        return state.payloads(most, self.config.dp_rank)

    def empty(self) -> bytes:
        """The payload of a batch without events."""
        return encode_batch(time.time(), [], self.config.dp_rank)

    async def snapshot(self) -> AsyncIterator[bytes]:
        """Parts of a snapshot, each a payload of one record. A reader forgets what it knew, takes
        every part, then every batch from `next_sequence` on."""
        state = await self.state()
        number = 0
        for events in state.stored():
            yield self._part(state.number, number, events, last=False)
            number += 1
            await asyncio.sleep(0)
        yield self._part(state.number, number, [], last=True)

    def _part(self, next_sequence: int, number: int, events: Any, *, last: bool) -> bytes:
        record = {
            "type": "Snapshot",
            "epoch": self.epoch,
            "next_sequence": next_sequence,
            "part": number,
            "last": last,
            "events": events,
        }
        return encode_batch(time.time(), [record], self.config.dp_rank)

    async def _publish_snapshots(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            self.hold()
            try:
                async for part in self.snapshot():
                    send(self._detail, self._detail_topic, self.detail_sequence, part)
                    self.detail_sequence += 1
            except Exception as error:
                get_logger().warning(
                    "snapshot failed", sink=self.name, error=f"{type(error).__name__}: {error}"
                )
            finally:
                self.release()

    def statistics(self) -> KvEventsStatistics:
        """A moment's picture."""
        server = self._server
        counts = (
            (server.requests, server.given_up, server.malformed)
            if server is not None
            else (0, 0, 0)
        )
        published = self.sequence - self.first
        return KvEventsStatistics(
            self.sequence,
            published,
            self.detail_sequence,
            self.window.held,
            *counts,
            self._states.made,
        )


def _nothing(**_: bool) -> Iterator[Any]:
    """What a sink without a notifier was sent."""
    return iter(())


Batch = tuple[list[Event], Sequence[FlushTask], int]
"""Events of one message, the task of each, and the number of tasks that are complete with it."""


def batches(tasks: Sequence[FlushTask], dialect: Dialect, max_blocks: int) -> Iterable[Batch]:
    """Tasks as messages of at most `max_blocks` blocks."""
    blocks = 0
    for task in tasks:
        blocks += task.count
    if blocks > max_blocks:
        return cut(tasks, dialect, max_blocks)
    events: list[Event] = []
    for task in tasks:
        events += dialect.events(task, max_blocks)  # one event
    return ((events, tasks, len(tasks)),) if events else ()


def cut(tasks: Sequence[FlushTask], dialect: Dialect, max_blocks: int) -> Iterator[Batch]:
    """The same for more blocks than one message takes."""
    events: list[Event] = []
    sources: list[FlushTask] = []
    blocks = 0
    for done, task in enumerate(tasks):
        for event in dialect.events(task, max_blocks):
            size = len(getattr(event, "block_hashes", ()))
            if events and blocks + size > max_blocks:
                yield events, sources, done
                events, sources, blocks = [], [], 0
            events.append(event)
            sources.append(task)
            blocks += size
    if events:
        yield events, sources, len(tasks)
