"""External indexes of the soak, each compared with the cache's announcements: a ZMQ reader, a
JSON-lines file, AttentionStore's stand-in."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from kvactors import Tier
from tests.oracle.sink import Recorder

MEDIA = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "STORAGE": Tier.STORAGE}
END = 0xFFFFFFFFFFFFFFFF
LIMIT = 30.0


class EventsReader:
    """Reads KV events as docs/kv_events.md specifies: a snapshot first, then every batch, replay on
    a gap. held: 64-bit hashes by tier."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.expected = -1
        self.snapshots = self.replays = 0
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Close the sockets."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    @property
    def broken(self) -> BaseException | None:
        """The error that ended the reader, if any."""
        return self._task.exception() if self._task.done() and not self._task.cancelled() else None

    async def _run(self) -> None:
        await self._snapshot()
        while True:
            _topic, number, payload = await self._sub.recv_multipart()
            await self._take(int.from_bytes(number, "big"), payload)

    async def _take(self, number: int, payload: bytes) -> None:
        if number < self.expected:
            return
        if number > self.expected and not await self._replay(number):
            await self._snapshot()
        if number == self.expected:
            self._apply(msgspec.msgpack.decode(payload)[1])
            self.expected += 1

    def _apply(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self.held = {tier: set() for tier in Tier}
            elif kind == "BlockStored":
                self.held[MEDIA[event["medium"]]].update(event["block_hashes"])
            else:
                self.held[MEDIA[event["medium"]]].difference_update(event["block_hashes"])

    async def _replay(self, until: int) -> bool:
        """Fetch the batches up to `until`; False if the publisher has dropped some."""
        self.replays += 1
        for number, payload in await self._ask(self.expected.to_bytes(8, "big")):
            if number == self.expected and number < until:
                self._apply(msgspec.msgpack.decode(payload)[1])
                self.expected += 1
        return self.expected == until

    async def _snapshot(self) -> None:
        self.snapshots += 1
        socket = self._dealer()
        try:
            await socket.send_multipart([b"", b"kvactors.snapshot"])
            self.held = {tier: set() for tier in Tier}
            while True:
                frames = await socket.recv_multipart()
                record = msgspec.msgpack.decode(frames[-1])[1][0]
                self._apply(record["events"])
                if record["last"]:
                    self.expected = record["next_sequence"]
                    return
        finally:
            socket.close(0)

    async def _ask(self, body: bytes) -> list[tuple[int, bytes]]:
        socket, found = self._dealer(), []
        try:
            await socket.send_multipart([b"", body])
            while True:
                frames = await socket.recv_multipart()
                number = int.from_bytes(frames[-2], "big")
                if number == END:
                    return found
                found.append((number, frames[-1]))
        finally:
            socket.close(0)

    def _dealer(self) -> Any:
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._replay_endpoint)
        return socket


def hashes(recorder: Recorder) -> dict[Tier, set[int]]:
    """The blocks that the cache announced, as readers of KV events name them."""
    return {
        tier: {int.from_bytes(key[-8:], "big") for key in keys}
        for tier, keys in recorder.held.items()
    }


async def agrees(reader: EventsReader, recorder: Recorder) -> str:
    """Empty once the reader holds the announced blocks, otherwise how they differ after LIMIT
    seconds."""
    wanted, loop = hashes(recorder), asyncio.get_running_loop()
    until = loop.time() + LIMIT
    while reader.held != wanted:
        if reader.broken is not None:
            return f"the reader ended with {reader.broken!r}"
        if loop.time() > until:
            counts = {
                tier.name: (
                    len(wanted[tier] - reader.held[tier]),
                    len(reader.held[tier] - wanted[tier]),
                )
                for tier in Tier
            }
            return f"a reader of KV events differs (missing, extra): {counts}"
        await asyncio.sleep(0.005)
    return ""


def jsonl_held(path: Path) -> dict[Tier, set[bytes]]:
    """The blocks that a file of JSON lines reports as resident."""
    held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "epoch":
            held = {tier: set() for tier in Tier}
            continue
        keys = {bytes.fromhex(key) for key in record["keys"]}
        tier = Tier[record["tier"].upper()]
        held[tier] = held[tier] | keys if record["residency"] == "resident" else held[tier] - keys
    return held


def stale_paths(resident: set[tuple[int, ...]], recorder: Recorder) -> int:
    """Token paths that AttentionStore's index has and neither device nor host holds."""
    held = recorder.held[Tier.DEVICE] | recorder.held[Tier.HOST]
    paths = {tuple(np.frombuffer(recorder.paths[key], "<u4").tolist()) for key in held}
    return len(resident - paths)
