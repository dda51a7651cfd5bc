"""Replay: what was published lately, for readers that lost some of it, asked for through a ROUTER socket.

A request is [empty, 8-byte big-endian sequence number]: the answer is everything kept from there on, oldest first, as
[empty, topic, sequence, payload], and [empty, empty, 2^64 - 1, empty] at the end (older readers: the same without the topic). A request
[empty, "kvactors.snapshot"] is answered in the same form with the parts of a snapshot, numbered from 0.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import islice
from typing import Any

import anyio
import structlog

from kvactors.flush_notifier.sinks.kv_sockets import zmq
from kvactors.flush_notifier.sinks.kv_wire import END, encode_sequence

SNAPSHOT = b"kvactors.snapshot"
CLIENTS = 16
"""Requests answered at once; further ones are dropped and counted, and their readers ask again."""
DEADLINE = 60.0
"""Seconds an answer may take."""
SLOW = 0.005
"""Seconds until a reader whose queue is full is tried again."""
BURST = 64
"""Messages sent before others may run."""

Parts = Callable[[], AsyncIterator[bytes]]


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
        return list(islice(self._kept, max(0, number - self._kept[0][0]), None))


class ReplayServer:
    """Answers requests until it is cancelled. snapshot: makes the parts of a snapshot."""

    def __init__(self, socket: Any, window: Window, topic: bytes, snapshot: Parts, *, with_topic: bool) -> None:
        self.requests = self.refused = self.malformed = 0
        self._socket = socket
        self._window = window
        self._topic = topic
        self._snapshot = snapshot
        self._with_topic = with_topic
        self._answers: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Take requests; each is answered in a task of its own, so that a slow reader delays no other."""
        try:
            while True:
                frames = await self._socket.recv_multipart()
                work = self._work(frames)
                if work is None:
                    self.malformed += 1
                elif len(self._answers) >= CLIENTS:
                    self.refused += 1
                    work.close()
                else:
                    self.requests += 1
                    task = asyncio.get_running_loop().create_task(self._limited(work))
                    self._answers.add(task)
                    task.add_done_callback(self._answers.discard)
        finally:
            for task in self._answers:
                task.cancel()

    def _work(self, frames: list[bytes]) -> Coroutine[Any, Any, None] | None:
        if len(frames) != 3 or frames[1]:
            return None
        reader, _, body = frames
        if body == SNAPSHOT:
            return self._send_snapshot(reader)
        return self._send_window(reader, int.from_bytes(body, "big")) if len(body) == 8 else None

    async def _limited(self, work: Coroutine[Any, Any, None]) -> None:
        with anyio.move_on_after(DEADLINE) as scope:
            try:
                await work
            except zmq.ZMQError as error:  # the reader is gone; it will ask again
                self._log.info("reader of a replay is gone", error=str(error))
        if scope.cancelled_caught:
            self._log.warning("reader of a replay was too slow", seconds=DEADLINE)

    async def _send_window(self, reader: bytes, start: int) -> None:
        for i, (number, payload) in enumerate(self._window.since(start)):
            await self._send(reader, number, payload, self._topic)
            if i % BURST == BURST - 1:
                await asyncio.sleep(0)
        await self._send(reader, END, b"", b"")

    async def _send_snapshot(self, reader: bytes) -> None:
        number = 0
        async for part in self._snapshot():
            await self._send(reader, number, part, self._topic)
            number += 1
        await self._send(reader, END, b"", b"")

    async def _send(self, reader: bytes, number: int, payload: bytes, topic: bytes) -> None:
        frames = [reader, b"", *self._frames(number, payload, topic)]
        while True:
            try:
                await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
                return
            except zmq.Again:
                await anyio.sleep(SLOW)

    def _frames(self, number: int, payload: bytes, topic: bytes) -> Iterator[bytes]:
        if self._with_topic:
            yield topic
        yield encode_sequence(number)
        yield payload
