"""Replay: what was published lately, for readers that lost some of it, asked for through a ROUTER socket.

A request is [empty, 8-byte big-endian sequence number]: the answer is everything kept from there on, oldest first, as
[empty, topic, sequence, payload], and [empty, empty, 2^64 - 1, empty] at the end (older readers: the same without the topic). A request
[empty, "kvactors.snapshot"] is answered in the same form with the parts of a snapshot, numbered from 0.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Any

import anyio

from kvactors.actor.log import get_logger
from kvactors.flush_notifier.sinks.kv_sockets import zmq
from kvactors.flush_notifier.sinks.kv_wire import END, encode_sequence

SNAPSHOT = b"kvactors.snapshot"
READERS = 16
"""Readers answered at once; the requests of others wait in ZMQ's queues for their turn."""
DEADLINE = 60.0
"""Seconds an answer may take."""
STALLED = 10.0
"""Seconds after which a reader that takes nothing loses its turn."""
SLOW = 0.005
"""Seconds until a reader whose queue is full is tried again."""
BURST = 64
"""Messages sent before others may run."""
QUEUED = 512
"""Messages that wait for one slow reader in ZMQ's queue: more memory is not spent on a reader that takes nothing."""

Parts = Callable[[], AsyncIterator[bytes]]


class Stalled(Exception):
    """A reader takes nothing."""


class Window:
    """The last batches published. batches, nbytes: how many, and how large, are kept at most (one batch always is)."""

    def __init__(self, batches: int, nbytes: int) -> None:
        self.batches = batches
        self.nbytes = nbytes
        self.held = 0
        self._kept: deque[tuple[int, bytes]] = deque()

    def add(self, number: int, payload: bytes) -> None:
        """Keep one more."""
        self._kept.append((number, payload))
        self.held += len(payload)
        while len(self._kept) > self.batches or (self.held > self.nbytes and len(self._kept) > 1):
            self.held -= len(self._kept.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """What is kept from a number on, oldest first."""
        if not self._kept:
            return []
        passed = min(max(0, number - self._kept[0][0]), len(self._kept))
        return list(islice(self._kept, passed, None))


class ReplayServer:
    """Answers requests until it is cancelled. snapshot: makes the parts of a snapshot.

    Each request is answered in a task of its own, so that a slow reader delays no other. A reader has one answer at a time: with a new
    request it gives up the one before.
    """

    def __init__(self, socket: Any, window: Window, topic: bytes, snapshot: Parts, *, with_topic: bool) -> None:
        self.requests = self.given_up = self.malformed = 0
        self._socket = socket
        self._window = window
        self._topic = topic
        self._snapshot = snapshot
        self._with_topic = with_topic
        self._answers: dict[bytes, asyncio.Task[None]] = {}  # by reader
        self._log = get_logger()

    async def run(self) -> None:
        """Take requests while fewer than READERS are being answered."""
        try:
            while True:
                try:
                    if len(self._answers) >= READERS:
                        await asyncio.wait(self._answers.values(), return_when=asyncio.FIRST_COMPLETED)
                    self._take(await self._socket.recv_multipart())
                except zmq.ZMQError as error:
                    if self._socket.closed:
                        return
                    self._log.warning("replay request failed", error=str(error))
                    await anyio.sleep(SLOW)
        finally:
            for task in self._answers.values():
                task.cancel()

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
            earlier.cancel()
        task = asyncio.get_running_loop().create_task(self._answer(reader, body))
        self._answers[reader] = task
        task.add_done_callback(lambda done: self._answers.pop(reader) if self._answers.get(reader) is done else None)

    async def _answer(self, reader: bytes, body: bytes) -> None:
        """All that is asked for, then the end marker."""
        with anyio.move_on_after(DEADLINE) as scope:
            try:
                if body == SNAPSHOT:
                    await self._send_snapshot(reader)
                else:
                    await self._send_window(reader, int.from_bytes(body, "big"))
                await self._send(reader, END, b"", b"")
            except (zmq.ZMQError, Stalled) as error:  # it will ask again
                self.given_up += 1
                self._log.info("reader of a replay is gone", error=str(error))
            except Exception as error:
                self.given_up += 1
                self._log.warning("replay failed", error=f"{type(error).__name__}: {error}")
        if scope.cancelled_caught:
            self.given_up += 1
            self._log.info("reader of a replay is gone", error=f"not done in {DEADLINE} s")

    async def _send_window(self, reader: bytes, start: int) -> None:
        for i, (number, payload) in enumerate(self._window.since(start)):
            await self._send(reader, number, payload, self._topic)
            if i % BURST == BURST - 1:
                await asyncio.sleep(0)

    async def _send_snapshot(self, reader: bytes) -> None:
        number = 0
        async for part in self._snapshot():
            await self._send(reader, number, part, self._topic)
            number += 1

    async def _send(self, reader: bytes, number: int, payload: bytes, topic: bytes) -> None:
        frames = [reader, b"", *self._frames(number, payload, topic)]
        stalled_at = anyio.current_time() + STALLED
        while True:
            try:
                await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
                return
            except zmq.Again:
                if anyio.current_time() > stalled_at:
                    raise Stalled(f"it took nothing for {STALLED} s") from None
                await anyio.sleep(SLOW)

    def _frames(self, number: int, payload: bytes, topic: bytes) -> Iterator[bytes]:
        if self._with_topic:
            yield topic
        yield encode_sequence(number)
        yield payload
