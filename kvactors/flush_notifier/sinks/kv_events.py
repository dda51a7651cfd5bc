"""KV events over ZMQ, as vLLM's and SGLang's engines publish them and KV-aware routers read them.

Publishing is sending to ZMQ's queues, which never blocks. A reader that falls behind loses
messages, sees a gap in the sequence and asks for a replay.

A replay request on the ROUTER socket is [empty, 8-byte big-endian sequence number]. The answer is
every batch from there on that was published before the request, oldest first, as [empty, topic,
sequence, payload], and [empty, empty, 2^64 - 1, empty] at the end (older readers: the same without
the topic). Of batches that are no longer kept the answer has the state they add up to, as ordinary
batches under the numbers before those that are kept: AllBlocksCleared, then BlockStored events,
then empty batches where the reader insists on every number (`fill`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import anyio

from kvactors.actor.log import get_logger
from kvactors.actor.sliced import pace
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask, GroupLabel
from kvactors.flush_notifier.sinks.base import Sink, SnapshotSource
from kvactors.flush_notifier.sinks.kv_sockets import Send, Sockets, zmq
from kvactors.flush_notifier.sinks.kv_wire import END, KvEventEncoder, encode_sequence
from kvactors.settings.sinks import KvEventsSinkConfig, of_rank
from kvactors.types import Residency, Tier, split_hashes

STATE_PART_BLOCKS = 256  # blocks in one batch of a state
SLICE_BLOCKS = 128  # blocks read from the ledger in one slice
EARLIEST_TIME_S = 1_735_689_600  # the year 2025: a clock before that is not set
LINGER_S = 0.5  # seconds in which published messages may leave after the sink is closed
EXTRA_BYTES = 16 << 20  # beyond twice the bounds of a window that holds what follows a state
EXTRA_BATCHES = 1_024

READERS = 64  # answered at once: a further one waits until one has its answer, or is too slow
QUEUED_MESSAGES = 128  # messages that wait for one slow reader in ZMQ's queue
STALL_S = 60.0  # time after which a reader that takes nothing loses its answer
HURRIED_STALL_S = 2.0  # the same while another reader waits for its turn
LONG_ANSWER_S = 60.0  # time an answer may take while another reader waits for its turn
# between attempts to send to a reader whose queue is full
SEND_PAUSES_S = (0.0, 0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
SLOW_READER_POLL_S = 0.1  # time between two looks for a reader that is too slow
BURST_MESSAGES = 64  # messages sent before others may run
MAX_FILL_BATCHES = 1_000_000  # empty batches sent in one answer at most


class Window:
    """The last batches published, with consecutive numbers.

    Attributes:
        batches, nbytes: how many, and how large, are kept at most (one batch always is).
        needed: number from which on batches are kept up to about twice these bounds.
    """

    def __init__(self, batches: int, nbytes: int) -> None:
        self.batches = batches
        self.nbytes = nbytes
        self.held = 0
        self.needed = END
        self._kept: deque[bytes] = deque()
        self._next = 0  # number after the last one

    def add(self, number: int, payload: bytes) -> None:
        kept = self._kept
        kept.append(payload)
        self._next = number + 1
        self.held += len(payload)
        while len(kept) > self.batches or (self.held > self.nbytes and len(kept) > 1):
            place = len(kept) <= 2 * self.batches + EXTRA_BATCHES and (
                self.held <= 2 * self.nbytes + EXTRA_BYTES
            )
            if self._next - len(kept) >= self.needed and place:
                return
            self.held -= len(kept.popleft())

    @property
    def first(self) -> int:
        """Number of the oldest batch that is kept; END if there is none."""
        return self._next - len(self._kept) if self._kept else END

    def since(self, number: int, limit: int = 1 << 62) -> list[tuple[int, bytes]]:
        """The batches kept from a number on, oldest first, at most `limit` batches."""
        first, end = self._next - len(self._kept), self._next
        start = max(first, number)
        return [(i, self._kept[i - first]) for i in range(start, min(start + limit, end))]


class StreamState(NamedTuple):
    """A state as encoded events: AllBlocksCleared, then the blocks, parents before children.
    number: of the first batch that is not part of it."""

    number: int
    parts: list[tuple[bytes, ...]]

    def batches(self, most: int) -> list[list[bytes]]:
        """The state as at most `most` batches (at least one)."""
        size = -(-len(self.parts) // max(1, most))
        starts = range(0, len(self.parts), size)
        return [list(chain.from_iterable(self.parts[start : start + size])) for start in starts]


class EventStream:
    """The batches of a publisher: numbered, sent, kept for replay, and summed up as states.

    Attributes:
        sequence, first: numbers of the next batch, and of this process's first.
        fill: whether readers insist on every number.
    """

    def __init__(self, config: KvEventsSinkConfig, encoder: KvEventEncoder, first: int) -> None:
        self.first = self.sequence = first
        self.fill = config.numbers == "from_zero"
        self.topic = config.topic.encode()
        self.window = Window(config.replay_window, config.replay_bytes)
        self.sources: dict[GroupLabel | None, SnapshotSource] = {}  # by group of layers
        self.sender: Send = _not_open
        self.states_made = 0
        self._encoder = encoder
        self._call: asyncio.Future[None] | None = None  # done at the end of the call in progress
        # published by the last call: may not be in the ledger's view of the sink yet
        self._last: dict[GroupLabel | None, Sequence[FlushTask]] = {}
        self._readers = 0
        self._state: StreamState | None = None
        self._making: asyncio.Task[StreamState] | None = None

    def publish(self, events: list[bytes]) -> None:
        self.send(self.payload(events))

    def payload(self, events: list[bytes]) -> bytes:
        return self._encoder.batch(time.time(), events)

    def send(self, payload: bytes) -> None:
        number = self.sequence
        self.window.add(number, payload)
        self.sender(self.topic, number, payload)
        self.sequence = number + 1

    def begin_call(self) -> None:
        self._call = asyncio.get_running_loop().create_future()

    def end_call(self, published: Sequence[FlushTask]) -> None:
        """The tasks of the call that were published."""
        if published:
            self._last[published[0].group] = published
        if self._call is not None:
            self._call.set_result(None)
            self._call = None

    def forget_calls(self) -> None:
        """Everything was removed, also what the last calls have published."""
        self._last.clear()
        self.end_call(())

    # -- the state

    async def state(self) -> StreamState:
        """A state after which every batch is still kept. The last one is kept for further readers
        until `drop_state`. Errors of the ledger pass."""
        if self._state is not None:
            number = self._state.number
            if number >= self.window.first or number == self.sequence:
                return self._state
        if self._making is None or self._making.done():
            self._making = asyncio.get_running_loop().create_task(self._make_state())
            # retrieved here even if no reader waits
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._making)

    async def _make_state(self) -> StreamState:
        """The state after the last call: a copy of the ledger's view and the tasks of that call. It
        is read in slices, while deliveries continue. Blocks that the ledger drops meanwhile are
        left out, since a batch after the state removes them."""
        while self._call is not None:
            await asyncio.wait([self._call])
        self.window.needed = number = self.sequence
        held_blocks = chain.from_iterable([source() for source in self.sources.values()])
        last = [task for tasks in self._last.values() for task in tasks]
        some = list(islice(held_blocks, SLICE_BLOCKS))  # the view is copied now
        if any(not task.count for task in last):
            some = []  # that task removed everything, and groups send theirs again
        parts: list[tuple[bytes, ...]] = [(self._encoder.cleared,)]
        changed = await tiers_changed(last)
        events: list[bytes] = []
        blocks = 0
        while some:
            for held in some:
                bits, now = changed.get((held.group, held.hash), (0, 0))
                tiers = held.tiers & ~bits | now
                events += [self._encoder.held(held, tier) for tier in Tier if tiers & tier]
                blocks += bool(tiers)
            if blocks >= STATE_PART_BLOCKS:
                parts.append(tuple(events))
                events, blocks = [], 0
            await asyncio.sleep(0)
            some = list(islice(held_blocks, SLICE_BLOCKS))
        if events:
            parts.append(tuple(events))
        self.states_made += 1
        self._state = StreamState(number, parts)
        return self._state

    def hold(self) -> None:
        """A reader is being answered: a state made for it is kept."""
        self._readers += 1

    def release(self) -> None:
        """One reader less. Without readers the window keeps no more than configured."""
        self._readers -= 1
        if not self._readers:
            self.drop_state()

    def drop_state(self) -> None:
        self._state = None
        self.window.needed = END
        if self._making is not None:
            self._making.cancel()
            self._making = None


async def tiers_changed(
    tasks: Sequence[FlushTask],
) -> dict[tuple[GroupLabel | None, bytes], tuple[int, int]]:
    """By group and hash of the blocks of some calls, the tiers that changed and those of them that
    hold the block afterwards. In slices."""
    changed: dict[tuple[GroupLabel | None, bytes], tuple[int, int]] = {}
    over = pace(SLICE_BLOCKS)
    for task in tasks:
        bit = task.tier.value
        gained = bit if task.residency is Residency.RESIDENT else 0
        for block_hash in split_hashes(task.hashes):
            bits, tiers = changed.get((task.group, block_hash), (0, 0))
            changed[task.group, block_hash] = bits | bit, tiers & ~bit | gained
            if over():
                await asyncio.sleep(0)
    return changed


def _not_open(*_: object) -> None:
    raise SinkError("the sink is not open")


# -- replay


@dataclass(slots=True, eq=False)
class ReplayAnswer:
    """One reader's answer."""

    reader: bytes
    began: float
    blocked: float = 0.0  # since when its queue has been full
    task: asyncio.Task[None] = field(init=False)


class ReplayServer:
    """Answers requests, each in its own task, so that a slow reader delays no other. A reader has
    one answer at a time: with a new request it gives up the one before."""

    def __init__(self, socket: Any, publisher: EventStream, *, with_topic: bool) -> None:
        self.requests = self.given_up = self.malformed = 0
        self._socket = socket
        self._publisher = publisher
        self._with_topic = with_topic
        self._answers: dict[bytes, ReplayAnswer] = {}  # by reader
        self._log = get_logger()

    async def run(self) -> None:
        """Take requests while fewer than READERS are being answered."""
        try:
            while True:
                try:
                    await self._turn()
                    self._take(await self._socket.recv_multipart())
                except zmq.ZMQError as error:
                    if self._socket.closed:
                        return
                    self._log.warning("replay request failed", error=str(error))
                    await anyio.sleep(SLOW_READER_POLL_S)
        finally:
            for answer in self._answers.values():
                answer.task.cancel()

    async def _turn(self) -> None:
        """Wait until one reader more can be answered, instead of one that is too slow."""
        while len(self._answers) >= READERS:
            tasks = [answer.task for answer in self._answers.values()]
            await asyncio.wait(
                tasks, timeout=SLOW_READER_POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            if len(self._answers) < READERS or not await self._socket.poll(0):
                continue
            slow = self._slowest()
            if slow is not None:
                self._given_up("too slow while others wait")
                self._answers.pop(slow.reader).task.cancel()

    def _slowest(self) -> ReplayAnswer | None:
        """The reader that has taken nothing for the longest time, or whose answer takes longest, if
        that is too long."""
        now, answers = anyio.current_time(), self._answers.values()
        blocked = min(
            (one for one in answers if one.blocked), key=lambda one: one.blocked, default=None
        )
        if blocked is not None and now - blocked.blocked >= HURRIED_STALL_S:
            return blocked
        oldest = min(answers, key=lambda one: one.began)
        return oldest if now - oldest.began >= LONG_ANSWER_S else None

    def _given_up(self, error: str) -> None:
        self.given_up += 1
        self._log.info("reader of a replay is gone", error=error)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self.malformed += 1
            return
        reader, _, body = frames
        self.requests += 1
        earlier = self._answers.pop(reader, None)
        if earlier is not None:
            earlier.task.cancel()
        self._answers[reader] = answer = ReplayAnswer(reader, anyio.current_time())
        self._publisher.hold()
        answer.task = asyncio.get_running_loop().create_task(self._answer(answer, body))

        def ended(_: asyncio.Task[None]) -> None:
            if self._answers.get(reader) is answer:
                del self._answers[reader]
            self._publisher.release()

        answer.task.add_done_callback(ended)

    async def _answer(self, answer: ReplayAnswer, body: bytes) -> None:
        try:
            try:
                await self._send_batches(answer, int.from_bytes(body, "big"))
            except (zmq.ZMQError, TimeoutError):
                raise
            except Exception as error:
                self.given_up += 1
                self._log.warning("replay failed", error=f"{type(error).__name__}: {error}")
            await self._send(answer, END, b"", b"")
        except (zmq.ZMQError, TimeoutError) as error:  # it will ask again
            self._given_up(str(error))

    async def _send_batches(self, answer: ReplayAnswer, start: int) -> None:
        """The batches from `start` on, with the state in place of the batches no longer kept."""
        publisher, window = self._publisher, self._publisher.window
        number, end = start, publisher.sequence
        while number < end:
            if number < window.first:
                number = await self._send_state(answer, number)
                continue
            for kept, payload in window.since(number, min(BURST_MESSAGES, end - number)):
                await self._send(answer, kept, payload, publisher.topic)
                number = kept + 1
            await asyncio.sleep(0)

    async def _send_state(self, answer: ReplayAnswer, number: int) -> int:
        """The state under the numbers from `number` on, or under the last ones before it
        ends. Returns the number of the batch that follows it."""
        publisher = self._publisher
        state = await publisher.state()
        batches = state.batches(state.number - number)
        left = state.number - number - len(batches)
        fill = left if publisher.fill and left <= MAX_FILL_BATCHES else 0
        first_empty = state.number - fill
        for at, events in enumerate(batches, first_empty - len(batches)):
            await self._send(answer, at, publisher.payload(events), publisher.topic)
            await asyncio.sleep(0)
        nothing = publisher.payload([]) if fill else b""
        for at in range(first_empty, state.number):
            await self._send(answer, at, nothing, publisher.topic)
            if not at % BURST_MESSAGES:
                await asyncio.sleep(0)
        return state.number

    async def _send(self, answer: ReplayAnswer, number: int, payload: bytes, topic: bytes) -> None:
        frames = [answer.reader, b"", encode_sequence(number), payload]
        if self._with_topic:
            frames.insert(2, topic)
        attempts = 0
        while True:
            try:
                await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
                answer.blocked = 0.0
                return
            except zmq.Again:
                now = anyio.current_time()
                answer.blocked = answer.blocked or now
                if now - answer.blocked > STALL_S:
                    raise TimeoutError(f"it took nothing for {STALL_S} s") from None
                await anyio.sleep(SEND_PAUSES_S[min(attempts, len(SEND_PAUSES_S) - 1)])
                attempts += 1


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
        self._encoder = KvEventEncoder(config, block_size)
        self.takes_groups = self._encoder.takes_groups
        first = first_number(config.numbers, self.name)
        self.events = EventStream(config, self._encoder, first)
        self.server: ReplayServer | None = None
        self._sockets: Sockets | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._sockets = sockets = Sockets(self.name)
        config = self.config
        try:
            socket = await sockets.publisher(self.endpoint, config.high_water_mark, config.bind)
            self.events.sender = sockets.sender(socket)
            self.endpoint = sockets.address(socket)
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
        self.events.sources[None] = source

    def set_group_source(self, group: GroupLabel, source: SnapshotSource) -> None:
        self.events.sources[group] = source

    async def begin_epoch(self, epoch: int) -> None:
        self.events.publish([self._encoder.cleared])
        self.events.forget_calls()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        self.num_acknowledged = 0
        stream, whole = self.events, self._encoder.batch_of_tasks(time.time(), tasks)
        stream.begin_call()
        try:
            if whole is not None:
                stream.send(whole)
                self.num_acknowledged = len(tasks)
            else:
                await self._deliver_parts(tasks, self.config.max_blocks)
        finally:
            stream.end_call(tasks[: self.num_acknowledged])

    async def _deliver_parts(self, tasks: Sequence[FlushTask], max_blocks: int) -> None:
        """Publish tasks of more blocks than one batch takes."""
        events: list[bytes] = []
        blocks = 0
        for done, task in enumerate(tasks):
            for event, size in self._encoder.events(task, max_blocks):
                if events and blocks + size > max_blocks:
                    self.events.publish(events)
                    self.num_acknowledged = done
                    await asyncio.sleep(0)
                    events, blocks = [], 0
                events.append(event)
                blocks += size
        if events:
            self.events.publish(events)
            self.num_acknowledged = len(tasks)

    async def _publish_heartbeats(self, interval: float) -> None:
        stream = self.events
        while True:
            number = stream.sequence
            await asyncio.sleep(interval)
            if stream.first < stream.sequence == number:
                stream.publish([])
