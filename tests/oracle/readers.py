"""External indexes of a round, each compared at rest with what was announced: a router's mirror of
KV events, a file of JSON lines, AttentionStore's stand-in."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np

from kvactors import Tier
from kvactors.flush_notifier.sinks.kv_wire import MEDIA
from tests.support.attentionstore_sdk import services
from tests.support.jsonl import replay_jsonl
from tests.support.mirror import Reader

from .draw import Draw
from .sink import Recorder
from .world import World

LIMIT = 30.0
"""Seconds within which the mirror must hold what was announced."""


class Readers:
    """The external indexes of the sinks of a draw. The reader of KV events is in a thread."""

    def __init__(self, drawn: Draw) -> None:
        sinks: list[dict[str, Any]] = drawn.tables["flush"].get("sinks", [])
        self._sinks = {sink["kind"]: sink for sink in sinks}
        self._reader: Reader | None = None
        if sink := self._sinks.get("kv_events"):
            self._reader = Reader(sink["endpoint"], sink["replay_endpoint"])
            self._reading = True
            self._thread = threading.Thread(target=self._read)
            self._thread.start()

    def _read(self) -> None:
        assert self._reader is not None
        while self._reading:
            self._reader.step(0.02)

    async def compare(self, world: World, recorder: Recorder) -> None:
        """Every reader holds the announced blocks."""
        if self._reader is not None:
            await self._compare_events(world, self._reader, recorder)
        if "jsonl" in self._sinks:
            if replay_jsonl(Path(self._sinks["jsonl"]["path"])) != recorder.held:
                world.fail("the JSON-lines file differs from what was announced")
            world.seen["JSON lines compared"] += 1
        if "attention_store" in self._sinks:
            held = recorder.held[Tier.DEVICE] | recorder.held[Tier.HOST]
            paths = {tuple(np.frombuffer(recorder.paths[key], "<u4").tolist()) for key in held}
            if stale := sum(len(one.resident - paths) for one in services.values()):
                world.fail(
                    f"AttentionStore's index has {stale} token paths that this node does not hold"
                )
            world.seen["AttentionStore's index compared"] += 1

    async def _compare_events(self, world: World, reader: Reader, recorder: Recorder) -> None:
        mirror, loop = reader.mirror, asyncio.get_running_loop()
        wanted = {
            MEDIA["vllm"][tier]: {int.from_bytes(key[-8:], "big") for key in keys}
            for tier, keys in recorder.held.items()
        }
        until = loop.time() + LIMIT
        while any(mirror.view.get(medium, set()) != held for medium, held in wanted.items()):
            if loop.time() > until or not self._thread.is_alive():
                counts = {
                    medium: (len(held - found), len(found - held))
                    for medium, held in wanted.items()
                    if (found := mirror.view.get(medium, set())) != held
                }
                world.fail(f"a reader of KV events differs (missing, extra): {counts}")
                return
            await asyncio.sleep(0.005)
        if mirror.orphans:
            world.fail(f"{mirror.orphans} blocks of KV events without the one above them")
        world.seen["KV events compared"] += 1
        world.seen["KV events replayed"] += reader.statistics.replayed
        world.seen["KV events states"] += reader.statistics.states

    async def close(self) -> None:
        if self._reader is not None:
            self._reading = False
            await asyncio.to_thread(self._thread.join)
            self._reader.close()
