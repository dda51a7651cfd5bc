"""Rounds of the soak: each on a newly drawn cache, or on the store of the round before."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

import kvactors
from tests.oracle.draw import Draw, draw
from tests.oracle.history import History
from tests.oracle.record import Record
from tests.oracle.run import serve_round
from tests.oracle.sink import Recorder
from tests.oracle.world import World
from tests.soak.memory import Memory, grow_intern_table, measure
from tests.soak.readers import EventsReader, jsonl_held, stale_paths
from tests.support.attentionstore_sdk import install, reset, services

ROUND = 400
"""Requests of a round."""


def run_rounds(
    seed: int,
    requests: int,
    until: float,
    report: Callable[[Record, Memory], None],
    *,
    hostile: bool = True,
) -> None:
    """Rounds until the requests are made or `until` (of `time.monotonic`) has come. report: is
    given each round's record and the memory after it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    install()
    grow_intern_table()
    number = made = 0
    while made < requests and time.monotonic() < until:
        size = min(ROUND, requests - made)
        record = Record()
        _round(seed * 1_000_003 + number, size, record, hostile=hostile)
        made += size
        number += 1
        report(record, measure())


def work(seed: int, requests: int, until: float, results: Any, hostile: bool, number: int) -> None:
    """The work of one process. Its results go into a queue."""
    signal.signal(signal.SIGUSR1, where)
    run_rounds(
        seed,
        requests,
        until,
        lambda record, memory: results.put((number, record, memory)),
        hostile=hostile,
    )
    results.put((number, None, None))


def where(_number: int, _frame: Any) -> None:
    """On SIGUSR1: what every task of this process waits for, on standard error."""
    for task in asyncio.all_tasks(asyncio.get_running_loop()):
        task.print_stack(file=sys.stderr)


def _round(seed: int, requests: int, record: Record, *, hostile: bool) -> None:
    folder = tempfile.mkdtemp(prefix="kvs-")
    drawn, history = draw(seed, folder), History()
    drawn.mix.hostile *= hostile
    try:
        again = drawn.store == "file" and requests > 10
        first = requests - requests // 4 if again else requests
        asyncio.run(serve_round(drawn, history, record, first, readers=Readers(drawn, folder)))
        if again:
            record.seen["opened again"] += 1
            asyncio.run(
                serve_round(
                    drawn, history, record, requests - first, life=1, readers=Readers(drawn, folder)
                )
            )
    except Exception as error:
        record.fail(f"seed {seed} ({drawn.store}): the round raised {error!r}")
    finally:
        reset()
        shutil.rmtree(folder, ignore_errors=True)


class Readers:
    """The external indexes of one round."""

    def __init__(self, drawn: Draw, folder: str) -> None:
        self.drawn = drawn
        self.folder = folder
        self._events: EventsReader | None = None

    def begin(self, _cache: kvactors.KVCache) -> None:
        """Connect."""
        if "kv_events" in self.drawn.sinks:
            sink = next(
                one for one in self.drawn.tables["flush"]["sinks"] if one["kind"] == "kv_events"
            )
            self._events = EventsReader(sink["endpoint"], sink["replay_endpoint"])

    async def compare(self, world: World, recorder: Recorder) -> None:
        """At rest: every reader holds the announced blocks."""
        if self._events is not None:
            differing = await self._events.differs(recorder)
            if differing:
                world.fail(differing)
            world.seen["KV events compared"] += 1
            world.seen["KV events replayed"] += self._events.statistics.replayed
            world.seen["KV events snapshots"] += self._events.statistics.snapshots
        if "jsonl" in self.drawn.sinks:
            path = Path(self.folder) / f"events-{self.drawn.seed}.jsonl"
            if jsonl_held(path) != recorder.held:
                world.fail("the JSON-lines file differs from what was announced")
            world.seen["JSON lines compared"] += 1
        if "attention_store" in self.drawn.sinks:
            stale = sum(stale_paths(one.resident, recorder) for one in services.values())
            if stale:
                world.fail(
                    f"AttentionStore's index has {stale} token paths that this node does not hold"
                )
            world.seen["AttentionStore's index compared"] += 1

    async def close(self) -> None:
        """Disconnect."""
        if self._events is not None:
            await self._events.close()
