"""One seed: a drawn cache under drawn work, at rest, closed, and some of them opened again on the
same store."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import kvactors
from kvactors.actor import loop
from kvactors.prefix_index import work
from tests.load.client import Client
from tests.support.attentionstore_sdk import install, reset
from tests.support.share_watch import ShareWatch

from .draw import MODEL, Draw, draw
from .history import History
from .readers import Readers
from .record import Record
from .sink import Recorder
from .threads import work_in_thread
from .world import World

LIMIT = 300.0
"""Seconds within which a round must end. Only a hang takes as long."""


async def serve_round(
    drawn: Draw,
    history: History,
    record: Record,
    requests: int,
    life: int = 0,
    *,
    inline: bool = False,
) -> None:
    """Open, serve, come to rest, look at everything, close. inline: copy in the loop's thread, for
    loops of virtual time."""
    rng = random.Random(f"round {drawn.seed} {life}")
    recorder = Recorder(drawn.block_size, record)
    config = kvactors.Config.from_mapping(drawn.tables)
    sinks = [recorder] if drawn.recorded else []
    async with AsyncExitStack() as stack:
        stack.enter_context(_limited(drawn))
        cache = await stack.enter_async_context(
            kvactors.open(config, sinks=sinks, inline_copies=inline)
        )
        world = World(cache, drawn, history, record)
        stack.enter_context(ShareWatch(world.fail, world.seen).installed())
        readers = Readers(drawn)
        stack.push_async_callback(readers.close)
        loop = asyncio.get_running_loop()
        share = requests // (drawn.clients + drawn.threads) if drawn.threads else 0
        left = [requests - share * drawn.threads]
        work = [
            loop.create_task(Client(world, f"{drawn.seed} {life} {number}", counter(left)).run())
            for number in range(drawn.clients)
        ]
        work += [
            loop.create_task(asyncio.to_thread(work_in_thread, world, number, share))
            for number in range(drawn.threads)
        ]
        done, late = await asyncio.wait(work, timeout=LIMIT)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                world.fail(f"a client ended with {task.exception()!r}")
        if late:
            world.fail(f"{len(late)} clients have not ended after {LIMIT} s")
            for task in late:
                task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await world.rest(rng)
        await readers.compare(world, recorder)


def counter(left: list[int]) -> Callable[[], bool]:
    """Whether one more request is made, of those that several clients share."""

    def more() -> bool:
        left[0] -= 1
        return left[0] >= 0

    return more


@contextmanager
def _limited(drawn: Draw) -> Iterator[None]:
    """Set the inline turns of a pass and the blocks of a turn. With few inline turns asks wait for
    the next pass, with few blocks requests take several turns."""
    before = loop.INLINE_TURNS, work.TURN_BLOCKS
    loop.INLINE_TURNS, work.TURN_BLOCKS = drawn.turns, drawn.part
    try:
        yield
    finally:
        loop.INLINE_TURNS, work.TURN_BLOCKS = before


def run_seed(seed: int, requests: int = 120) -> Record:
    """The record of one seed."""
    folder = tempfile.mkdtemp(prefix="kvo-")
    record, history = Record(), History()
    drawn = draw(seed, folder)
    install()
    try:
        asyncio.run(serve_round(drawn, history, record, requests))
        if drawn.store == "file" and not record.failed:
            record.seen["opened again"] += 1
            asyncio.run(serve_round(drawn, history, record, requests // 2, life=1))
            _other_model(drawn, record, requests // 4)
    except Exception as error:
        record.fail(f"seed {seed} ({drawn.store}): the round raised {error!r}")
    finally:
        reset()
        shutil.rmtree(folder, ignore_errors=True)
        if Path(folder).exists():
            record.fail("the folder of a seed cannot be removed")
    return record


def _other_model(drawn: Draw, record: Record, requests: int) -> None:
    """Another model on the same store: it must hit nothing of the first one's."""
    cache = {**drawn.tables["cache"], "model": f"not {MODEL}"}
    other = replace(drawn, tables=drawn.tables | {"cache": cache})
    record.seen["opened by another model"] += 1
    asyncio.run(serve_round(other, History(begun=1, floor=1), record, requests, life=2))
