"""Stores that nodes share, beside their raw clients in the same run: blocks of finished requests
reach the store, and come back to requests of another cache, without a host tier.

The servers are processes of this machine: moto's for S3, and a Valkey or Redis server.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from unittest import mock

from kvactors.settings import StorageConfig
from kvactors.signals import run_terminable
from kvactors.storage.object import open_store
from kvactors.storage.valkey import PIPELINE_BYTES, THREADS
from tests.benchmarks.frame import Report, Row, rate_row
from tests.benchmarks.service import DEPTH, SIZE, Place, Work, come_back, save
from tests.support.s3 import CREDENTIALS, s3_server
from tests.support.valkey import PROGRAM, valkey_server

ROUNDS = 3
AT_ONCE = 32
"""Requests at once that read."""

OBSTORE, REDIS = f"obstore alone, {DEPTH} at once", f"redis-py alone, {THREADS} pipelines at once"
Raw = Callable[[Place, str, Sequence[str]], None]
"""Moves objects with the raw client."""

DATA = os.urandom(SIZE)


def by_obstore(place: Place, what: str, names: Sequence[str]) -> None:
    """Objects of a bucket or a folder."""
    store, rest = open_store(StorageConfig(**place)), iter(names)

    async def work() -> None:
        for name in rest:
            if what == "write":
                await store.put_async(name, DATA, use_multipart=False)
            else:
                await (await store.get_async(name)).bytes_async()

    async def all_of_it() -> None:
        await asyncio.gather(*(work() for _ in range(DEPTH)))

    asyncio.run(all_of_it())


def by_redis(place: Place, what: str, names: Sequence[str]) -> None:
    """Values of a server."""
    import redis

    client, step = redis.Redis.from_url(place["valkey"]["url"]), PIPELINE_BYTES // SIZE

    def move(first: int) -> None:
        with client.pipeline(transaction=False) as pipe:
            for name in names[first : first + step]:
                pipe.set(name, DATA) if what == "write" else pipe.get(name)
            pipe.execute()

    with client, ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(move, range(0, len(names), step)))


def rows_of(name: str, places: Iterator[Place], work: Work, raw: Raw, limit: str) -> list[Row]:
    """Medians of rounds, each in a place of its own, in which ours and the raw client take turns.
    RuntimeError if blocks were lost."""
    rates: dict[tuple[str, bool], list[float]] = {}
    names = [f"raw/{number}" for number in range(work.total)]
    for place in places:
        for what in ("write", "read"):
            moved = run_terminable(
                save(place, work, 0, "write_through")
                if what == "write"
                else come_back(place, work, AT_ONCE, 0, full=False)
            )
            if moved.share < 100:
                raise RuntimeError(f"{name}: {100 - moved.share} % were lost by a {what}")
            began = time.perf_counter()
            raw(place, what, names)
            for ours, seconds in ((True, moved.seconds), (False, time.perf_counter() - began)):
                rates.setdefault((what, ours), []).append(work.total * SIZE / seconds / 1e6)
    return [
        rate_row(
            f"{name}, {work}, {what}",
            median(rates[what, True]),
            median(rates[what, False]),
            "MB/s",
            limit,
        )
        for what in ("write", "read")
    ]


def run(*, quick: bool = False) -> Report:
    """All rows. There are none of Valkey without a server."""
    rounds = 1 if quick else ROUNDS
    work, small = (Work(2, 8),) * 2 if quick else (Work(32, 64), Work(8, 16))
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvactors-shared-", dir=".")
        )
        stack.enter_context(mock.patch.dict(os.environ, CREDENTIALS))
        server = stack.enter_context(s3_server())
        top = Path(folder).resolve()
        folders = (
            {"backend": "object", "url": f"file://{tempfile.mkdtemp(dir=top)}"}
            for _ in range(rounds)
        )
        buckets = (server.storage(f"round-{n}", timeout_s=120.0) for n in range(rounds))
        rows = rows_of("object, a folder", folders, work, by_obstore, OBSTORE)
        rows += rows_of("object, moto's S3", buckets, small, by_obstore, OBSTORE)
        if PROGRAM is not None:
            valkey = stack.enter_context(valkey_server())

            def empty() -> Iterator[Place]:
                for _ in range(rounds):
                    valkey.client().flushall()
                    url = f"redis://{valkey.address}"
                    yield {"backend": "valkey", "valkey": {"url": url}}

            rows += rows_of("valkey", empty(), work, by_redis, REDIS)
    return Report(rows, {"block_bytes": SIZE, "at_once": AT_ONCE, "rounds": rounds, "quick": quick})
