"""Replay: what was published lately, and the state before that, for readers that lack some of it,
asked for through a ROUTER socket.

A request is [empty, 8-byte big-endian sequence number]. The answer is every batch from there on
that was published before the request, oldest first, as [empty, topic, sequence, payload], and
[empty, empty, 2^64 - 1, empty] at the end (older readers: the same without the topic). Of batches
that are no longer kept the answer has the state they add up to, as ordinary batches under the
numbers before those that are kept: AllBlocksCleared, then BlockStored events, then empty batches
where the reader insists on every number (`fill`). A request [empty, "kvactors.snapshot"] is
answered in the same form with the parts of a snapshot, numbered from 0.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import anyio

from kvactors.actor.log import get_logger
from kvactors.flush_notifier.sinks.kv_sockets import zmq
from kvactors.flush_notifier.sinks.kv_state import StreamState
from kvactors.flush_notifier.sinks.kv_wire import END, encode_sequence

SNAPSHOT = b"kvactors.snapshot"
READERS = 64
"""Readers answered at once. A further request waits until one of them has its answer, or is too
slow for that (HURRY, LONG)."""
QUEUED = 128
"""Messages that wait for one slow reader in ZMQ's queue: more memory is not spent on a reader that
takes nothing."""
STALLED = 60.0
"""Seconds after which a reader that takes nothing loses its answer."""
HURRY = 2.0
"""The same while another reader waits for its turn."""
LONG = 60.0
"""Seconds an answer may take while another reader waits for its turn."""
SLOW = (0.0, 0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Seconds between attempts to send to a reader whose queue is full. The last one is repeated."""
LOOK = 0.1
"""Seconds between two looks for a reader that is too slow."""
BURST = 64
"""Messages sent before others may run."""
FILL = 1_000_000
"""Empty batches sent in one answer at most."""
EXTRA_BYTES = 16 << 20
EXTRA_BATCHES = 1_024
"""How much a window may exceed twice its bounds while a state is sent that precedes what it
holds."""


class Stalled(Exception):
    """A reader takes nothing."""


class Window:
    """The last batches published, with consecutive numbers.

    Attributes:
        batches, nbytes: how many, and how large, are kept at most (one batch always is).
        needed: number from which on batches are kept beyond these bounds, up to about twice as
            much.
    """

    def __init__(self, batches: int, nbytes: int) -> None:
        self.batches = batches
        self.nbytes = nbytes
        self.held = 0
        self.needed = END
        self._kept: deque[bytes] = deque()
        self._next = 0  # number after the last one

    def add(self, number: int, payload: bytes) -> None:
        """Keep one more. number: that after the last one."""
        kept = self._kept
        kept.append(payload)
        self._next = number + 1
        self.held += len(payload)
        while len(kept) > self.batches or (self.held > self.nbytes and len(kept) > 1):
            if self._next - len(kept) >= self.needed and self._has_place():
                return
            self.held -= len(kept.popleft())

    def _has_place(self) -> bool:
        return (
            len(self._kept) <= 2 * self.batches + EXTRA_BATCHES
            and self.held <= 2 * self.nbytes + EXTRA_BYTES
        )

    @property
    def first(self) -> int:
        """Number of the oldest batch that is kept; END if there is none."""
        return self._next - len(self._kept) if self._kept else END

    def since(self, number: int, limit: int = 1 << 62) -> list[tuple[int, bytes]]:
        """The batches kept from a number on, oldest first, at most `limit` batches."""
        first, end = self._next - len(self._kept), self._next
        start = max(first, number)
        return [(i, self._kept[i - first]) for i in range(start, min(start + limit, end))]


class Publisher(Protocol):
    """The source of a replay.

    Attributes:
        sequence: number of the next batch.
        first: number of this process's first batch.
        fill: whether readers insist on every number.
    """

    window: Window
    sequence: int
    first: int
    fill: bool
    topic: bytes

    async def state(self) -> StreamState:
        """The state after which every batch is still kept."""
        ...

    def hold(self) -> None:
        """A reader is being answered."""
        ...

    def release(self) -> None:
        """One reader less."""
        ...

    def empty(self) -> bytes:
        """The payload of a batch without events."""
        ...

    def snapshot(self) -> AsyncIterator[bytes]:
        """The parts of a snapshot."""
        ...

    def payloads(self, state: StreamState, most: int) -> Iterator[bytes]:
        """A state as at most `most` batches."""
        ...


class ReplayAnswer:
    """One reader's answer.

    Attributes:
        began: when.
        blocked: since when its queue has been full (0: it is not).
    """

    __slots__ = ("began", "blocked", "reader", "task")

    def __init__(self, reader: bytes) -> None:
        self.reader = reader
        self.began = anyio.current_time()
        self.blocked = 0.0
        self.task: asyncio.Task[None] | None = None


class ReplayServer:
    """Answers requests until it is cancelled.

    Each request is answered in its own task, so that a slow reader delays no other. A reader
    has one answer at a time: with a new request it gives up the one before.
    """

    def __init__(self, socket: Any, publisher: Publisher, *, with_topic: bool) -> None:
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
                    await anyio.sleep(LOOK)
        finally:
            for answer in self._answers.values():
                self._cancel(answer)

    @staticmethod
    def _cancel(answer: ReplayAnswer) -> None:
        if answer.task is not None:
            answer.task.cancel()

    async def _turn(self) -> None:
        """Wait until one reader more can be answered. A reader that is too slow while others wait
        loses its answer."""
        while len(self._answers) >= READERS:
            tasks = [answer.task for answer in self._answers.values() if answer.task is not None]
            await asyncio.wait(tasks, timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
            if len(self._answers) < READERS or not await self._socket.poll(0):
                continue
            slow = self._slowest()
            if slow is not None:
                self._given_up("too slow while others wait")
                self._cancel(self._answers.pop(slow.reader))

    def _slowest(self) -> ReplayAnswer | None:
        """The reader that has taken nothing for the longest time, or whose answer takes longest, if
        that is too long."""
        now = anyio.current_time()
        blocked = [answer for answer in self._answers.values() if answer.blocked]
        if (
            blocked
            and now - (answer := min(blocked, key=lambda answer: answer.blocked)).blocked >= HURRY
        ):
            return answer
        answer = min(self._answers.values(), key=lambda answer: answer.began)
        return answer if now - answer.began >= LONG else None

    def _given_up(self, error: str) -> None:
        self.given_up += 1
        self._log.info("reader of a replay is gone", error=error)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1]:
            self.malformed += 1
            return
        reader, _, body = frames
        if body != SNAPSHOT and len(body) != 8:
            self.malformed += 1
            return
        self.requests += 1
        earlier = self._answers.pop(reader, None)
        if earlier is not None:
            self._cancel(earlier)
        self._answers[reader] = answer = ReplayAnswer(reader)
        self._publisher.hold()
        answer.task = asyncio.get_running_loop().create_task(self._answer(answer, body))

        def ended(_: asyncio.Task[None]) -> None:
            if self._answers.get(reader) is answer:
                del self._answers[reader]
            self._publisher.release()

        answer.task.add_done_callback(ended)

    async def _answer(self, answer: ReplayAnswer, body: bytes) -> None:
        """All that is asked for, then the end marker."""
        try:
            try:
                if body == SNAPSHOT:
                    await self._send_snapshot(answer)
                else:
                    await self._send_batches(answer, int.from_bytes(body, "big"))
            except (zmq.ZMQError, Stalled):
                raise
            except Exception as error:
                self.given_up += 1
                self._log.warning("replay failed", error=f"{type(error).__name__}: {error}")
            await self._send(answer, END, b"", b"")
        except (zmq.ZMQError, Stalled) as error:  # it will ask again
            self._given_up(str(error))

    async def _send_batches(self, answer: ReplayAnswer, start: int) -> None:
        """Every batch from `start` on that has been published, with the state in the place of those
        that are no longer kept."""
        publisher, window = self._publisher, self._publisher.window
        number, end = start, publisher.sequence
        while number < end:
            if number < window.first:
                number = await self._send_state(answer, number)
                continue
            for kept, payload in window.since(number, min(BURST, end - number)):
                await self._send(answer, kept, payload, publisher.topic)
                number = kept + 1
            await asyncio.sleep(0)

    async def _send_state(self, answer: ReplayAnswer, number: int) -> int:
        """The state under the numbers from `number` on, or under the last ones before it
        ends. Returns the number of the batch that follows it."""
        publisher = self._publisher
        state = await publisher.state()
        room = state.number - number
        parts = state.count(room)
        fill = room - parts if publisher.fill and room - parts <= FILL else 0
        number = state.number - parts - fill
        for i, payload in enumerate(publisher.payloads(state, room)):
            await self._send(answer, number + i, payload, publisher.topic)
            await asyncio.sleep(0)
        nothing = publisher.empty() if fill else b""
        for i in range(fill):
            await self._send(answer, number + parts + i, nothing, publisher.topic)
            if i % BURST == BURST - 1:
                await asyncio.sleep(0)
        return state.number

    async def _send_snapshot(self, answer: ReplayAnswer) -> None:
        number = 0
        async for part in self._publisher.snapshot():
            await self._send(answer, number, part, self._publisher.topic)
            number += 1

    async def _send(self, answer: ReplayAnswer, number: int, payload: bytes, topic: bytes) -> None:
        frames = [answer.reader, b"", *self._frames(number, payload, topic)]
        attempts = 0
        while True:
            try:
                await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
                answer.blocked = 0.0
                return
            except zmq.Again:
                now = anyio.current_time()
                answer.blocked = answer.blocked or now
                if now - answer.blocked > STALLED:
                    raise Stalled(f"it took nothing for {STALLED} s") from None
                await anyio.sleep(SLOW[min(attempts, len(SLOW) - 1)])
                attempts += 1

    def _frames(self, number: int, payload: bytes, topic: bytes) -> Iterator[bytes]:
        if self._with_topic:
            yield topic
        yield encode_sequence(number)
        yield payload
