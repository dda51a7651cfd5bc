"""What storage faults cost: each fault of the table on a real file store behind a real cache, and
on how many points it ended as it should."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvactors.bench.report import Row, bench_report, rate_row
from kvactors.cache import KVCache, open_cache
from kvactors.config import Config
from kvactors.errors import KVActorsError
from kvactors.scenario.engine import Engine
from kvactors.scenario.report import Totals
from kvactors.storage.backends.file import FileBackend
from kvactors.terminable import run_terminable
from kvactors.testing.faults import rot
from kvactors.testing.kills import storm

BLOCK, PROMPTS, BLOCKS = 16, 12, 8
CHECKS = "no wrong byte, no error to a request, counted, nothing lost or left in use, indexes right"


def config(folder: str, **storage: Any) -> Config:
    """A small cache over a file store, so that nearly every request goes through it."""
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK, "deadline": 5.0},
            "device": {"num_blocks": 24},
            "host": {"slots": 8, "transit_slots": 64},
            "layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
            "storage": {
                "backend": "file",
                "directory": folder,
                "write_policy": "write_through",
                **storage,
            },
            "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
        }
    )


class Case:
    """One fault on one cache; `points` are the checks that held."""

    def __init__(self, folder: str, **storage: Any) -> None:
        self.settings = config(folder, **storage)
        self.totals = Totals()
        self.counted = 0

    async def serve(self, cache: KVCache, seeds: range) -> None:
        """Requests, whose blocks are verified when they come back."""
        engine = Engine(cache, self.totals)
        for seed in seeds:
            try:
                await engine.serve(f"r{seed}", [seed] * (BLOCK * BLOCKS + 1))
                await cache.settled(20.0)
            except KVActorsError as error:
                engine.failed(f"r{seed}", error)

    async def run(self, fault: Callable[[FileBackend], Any], counter: str) -> int:
        """Fill, break, use; the number of points that held."""
        async with open_cache(self.settings) as cache:
            store: Any = cache.system.backend
            await self.serve(cache, range(PROMPTS))
            result = fault(store)
            with result if hasattr(result, "__enter__") else nothing():
                await self.serve(cache, range(PROMPTS))
            await self.serve(cache, range(PROMPTS))
            await cache.flush_settled(20.0)
            counts = cache.statistics()
            counted = (
                getattr(counts.store, counter, 0)
                or getattr(counts.host, counter, 0)
                or counter == ""
            )
            return sum(
                (
                    self.totals.corrupt_blocks_served == 0,
                    not self.totals.errors,
                    bool(counted),
                    cache.check() == [],
                    cache.divergence() == 0,
                )
            )


@contextmanager
def nothing() -> Iterator[None]:
    """No fault that ends."""
    yield


def truncate(share: float) -> Callable[[FileBackend], None]:
    """Cut the first slab."""

    def cut(store: FileBackend) -> None:
        slab = store.files.folder / "slab-0000"
        used = max((slot for slot, _ in store._objects.values()), default=0) + 1
        os.truncate(slab, int(used * store.files.meta.stride * share))

    return cut


def delete(store: FileBackend) -> None:
    """Delete the folder behind its back."""
    shutil.rmtree(store.files.folder)


@contextmanager
def refusing(number: int) -> Iterator[None]:
    """Every write to a file is refused with this error."""
    real = os.pwritev

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    os.pwritev = refuse
    try:
        yield
    finally:
        os.pwritev = real


async def restart(folder: str) -> int:
    """Close, open, and find everything."""
    case = Case(folder)
    async with open_cache(case.settings) as cache:
        await case.serve(cache, range(PROMPTS))
    async with open_cache(case.settings) as cache:
        before = case.totals.storage
        await case.serve(cache, range(PROMPTS))
        await cache.flush_settled(20.0)
        found = case.totals.storage - before == PROMPTS * BLOCKS
        return sum(
            (
                case.totals.corrupt_blocks_served == 0,
                not case.totals.errors,
                found,
                cache.check() == [],
                cache.divergence() == 0,
            )
        )


@contextmanager
def no_direct_io() -> Iterator[None]:
    """The file system refuses O_DIRECT."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *rest, **more)

    os.open = refuse
    try:
        yield
    finally:
        os.open = real


async def points(folder: Path) -> dict[str, int]:
    """By fault: points that held, of five."""

    def at(name: str) -> str:
        return str(folder / name)

    held = {
        "one bit flipped in every third object": await Case(at("bit")).run(
            lambda store: rot(store, 3), "corrupt"
        ),
        "file cut in half": await Case(at("half")).run(truncate(0.5), "corrupt"),
        "file empty": await Case(at("empty")).run(truncate(0.0), "corrupt"),
        "folder deleted behind its back": await Case(at("deleted")).run(delete, "unavailable"),
        "disk full": await Case(at("full"), exclusive=True).run(
            lambda _: refusing(errno.ENOSPC), "no_space"
        ),
        "read-only file system": await Case(at("readonly"), exclusive=True).run(
            lambda _: refusing(errno.EROFS), "unavailable"
        ),
        "restart": await restart(at("restart")),
    }
    tight = Case(at("tight"))
    tight.settings = Config.from_mapping(
        {**as_mapping(tight.settings), "host": {"slots": 2, "transit_slots": 2}}
    )
    held["staging memory exhausted"] = await tight.run(lambda _: None, "")
    with no_direct_io():
        held["O_DIRECT refused"] = await Case(at("buffered")).run(lambda _: None, "")
    return held


def as_mapping(settings: Config) -> dict[str, Any]:
    """A config as TOML would give it."""
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(settings)
    return found


def run(*, quick: bool = False) -> dict[str, Any]:
    """All rows. quick: fewer kills."""
    rounds = 5 if quick else 200
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvactors-faults-") as name:
        for case, held in run_terminable(points(Path(name))).items():
            rows.append(rate_row(case, held, 5, "points", CHECKS))
        seen = run_terminable(storm(Path(name) / "storm", rounds))
        good = seen.announced - seen.missing
        rows.append(
            rate_row(
                f"kill -9, {rounds} times: announced blocks that are there",
                good,
                seen.announced,
                "blocks",
                "all of them",
            )
        )
        right = seen.served
        rows.append(
            rate_row(
                f"kill -9, {rounds} times: blocks read right",
                right,
                right + seen.wrong,
                "blocks",
                "all that are held",
            )
        )
    return bench_report("faults", rows, {"rounds": rounds, "quick": quick})
