"""External indexes of the soak, each compared with the cache's announcements: a router's mirror, a
JSON-lines file, AttentionStore's stand-in."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import numpy as np

from kvactors import Tier
from kvactors.flush_notifier.sinks.kv_wire import MEDIA
from tests.oracle.sink import Recorder
from tests.support.mirror import Reader

LIMIT = 30.0


class EventsReader:
    """A strict reader of KV events in a thread (see `tests.support.mirror`)."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._reader = Reader(endpoint, replay_endpoint)
        self.statistics = self._reader.statistics
        self._reading = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._reading:
            self._reader.step(0.02)

    async def differs(self, recorder: Recorder) -> str:
        """Empty once the mirror holds the announced blocks, otherwise how they differ after LIMIT
        seconds."""
        mirror, loop = self._reader.mirror, asyncio.get_running_loop()
        wanted = {
            MEDIA["vllm"][tier]: {int.from_bytes(key[-8:], "big") for key in keys}
            for tier, keys in recorder.held.items()
        }
        until = loop.time() + LIMIT
        while any(mirror.view.get(medium, set()) != held for medium, held in wanted.items()):
            if loop.time() > until or not self._thread.is_alive():
                counts = {
                    medium: (
                        len(held - mirror.view.get(medium, set())),
                        len(mirror.view.get(medium, set()) - held),
                    )
                    for medium, held in wanted.items()
                }
                return f"a reader of KV events differs (missing, extra): {counts}"
            await asyncio.sleep(0.005)
        return f"{mirror.orphans} blocks without the one above them" if mirror.orphans else ""

    async def close(self) -> None:
        """Close the sockets."""
        self._reading = False
        await asyncio.to_thread(self._thread.join)
        self._reader.close()


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
