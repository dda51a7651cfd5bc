"""A Mooncake pool through the back end beside its raw client, in the benchmark `store`."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.native import check_headers, make_headers
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.signals import run_terminable
from kvactors.storage.backend import SlotViews
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import HEADER, Fit, MooncakeBackend, PoolHeaders
from tests.benchmarks.report import Row, rate_row
from tests.benchmarks.store_rounds import DIGEST, names, processor_seconds, rounds_within
from tests.support.masters import master

ROUNDS = 9
LOADS = ((2 << 20, 256 << 20), (64 << 10, 128 << 20), (4 << 10, 16 << 20))
"""Bytes of an object, and of a round."""

SECONDS = 20.0
"""No round of a load begins behind them. Nine rounds take less on an idle machine."""

BATCH_BYTES, BATCH = 64 << 20, 1024
"""Bytes and objects of a batch at most. Each runner moves the same batches. The client rejects
transfers beyond those that it queues for a peer, which are 1,024 by default."""


class Runner(IntEnum):
    """Who moves the objects: the back end or its raw client, without checksums of the payloads or
    with them. A raw client's caller computes its checksums."""

    OURS = 0
    RAW = 1
    OURS_CHECKED = 2
    RAW_CHECKED = 3

    @property
    def ours(self) -> bool:
        """Whether it is the back end."""
        return self in (Runner.OURS, Runner.OURS_CHECKED)

    @property
    def checks(self) -> bool:
        """Whether it makes checksums and verifies them."""
        return self in (Runner.OURS_CHECKED, Runner.RAW_CHECKED)


RUNNERS = tuple(Runner)
NAMES = {
    Runner.OURS: "ours without checksums",
    Runner.RAW: "the raw client",
    Runner.OURS_CHECKED: "ours with checksums",
    Runner.RAW_CHECKED: "the raw client, checksums by its caller",
}
BESIDE = (
    (Runner.OURS, Runner.RAW, "no checksums"),
    (Runner.OURS_CHECKED, Runner.RAW_CHECKED, "checksums"),
    (Runner.OURS_CHECKED, Runner.RAW, "checksums beside none"),
)
"""Rows of a case. The first two compare runners that do the same."""
MEMCPY = "MC_STORE_MEMCPY"
"""Variable of the client: with 0 it moves objects in the same process over TCP as well."""

CALLS = {"write": "batch_put_from_multi_buffers", "read": "batch_get_into_multi_buffers"}
"""Calls of the client by direction."""

Directions = dict[tuple[str, Runner], list[tuple[float, float]]]
"""Bytes a second and processor seconds for a GB, by direction and runner."""


class PoolRunners:
    """The same objects through the back end and through its raw client.

    Args:
        store: the back end.
        arena: registered with the client.
        count: objects of a round.
    """

    def __init__(self, store: MooncakeBackend, arena: Arena, count: int) -> None:
        self._store, self._arena = store, arena
        self.keys = names(count)
        self._headers = {
            checks: PoolHeaders(store.digest, store.block_bytes, checks) for checks in (True, False)
        }
        self.raw = ["raw/" + key.hex() for key in self.keys]
        self._deadline = asyncio.get_running_loop().time() + 600.0

    async def move(self, what: str, runner: Runner) -> None:
        """All objects, batch by batch.

        Raises:
            RuntimeError: an object was lost.
        """
        slots = self._arena.num_slots
        for start in range(0, len(self.keys), slots):
            some = slice(start, min(start + slots, len(self.keys)))
            moved = self._ours if runner.ours else self._raw
            if not await moved(what, some, runner.checks):
                raise RuntimeError("an object was lost")

    def _expired(self) -> bool:
        return asyncio.get_running_loop().time() > self._deadline

    async def _ours(self, what: str, some: slice, checked: bool) -> bool:
        self._store._headers = self._headers[checked]
        call = self._store.write if what == "write" else self._store.read
        keys = self.keys[some]
        report = await call(keys, SlotViews(self._arena, range(len(keys))), self._expired)
        return set(report.outcomes) == {Outcome.OK}

    async def _raw(self, what: str, some: slice, checked: bool) -> bool:
        """One call of the client, and without `checked` nothing else. With it, headers are made
        before a write and compared after a read, as by a user who verifies objects."""
        client, size = self._store.client, self._store.block_bytes
        keys, stride = self.keys[some], self._arena.stride
        payloads = [self._arena.address + slot * stride for slot in range(len(keys))]
        pointers = [[at] for at in payloads]
        sizes = [[size + (HEADER.size if checked else 0)]] * len(keys)
        about = (DIGEST, b"".join(keys), pointers, size)
        if checked and what == "write":
            await asyncio.to_thread(make_headers, *about)
        method = CALLS[what]
        arguments = self.raw[some], pointers, sizes
        codes = await client.call(lambda store: list(getattr(store, method)(*arguments)), [-1])
        if checked and what == "read":
            fits = await asyncio.to_thread(check_headers, *about)
            return fits == bytes([Fit.FITS]) * len(keys)
        return min(codes) >= 0

    async def remove(self, runner: Runner) -> None:
        """The objects of a round."""
        gone = [self._store.name(key) for key in self.keys] if runner.ours else self.raw
        await self._store.client.call(lambda store: store.batch_remove(gone, True), None)


async def in_pool(address: str, size: int, total: int, rounds: int) -> Directions:
    """Rounds of all runners, in another order each time. The first round is not counted."""
    count, slots = total // size, max(4, min(min(total, BATCH_BYTES) // size, BATCH))
    config = MooncakeConfig(
        master_server_address=address,
        local_hostname="127.0.0.1",
        global_segment_size=f"{(total * 5 >> 20) + 64}MB",
        local_buffer_size="16MB",
    )
    store = MooncakeBackend(config, StoreIdentity("bench", "default", DIGEST), size)
    arena = Arena(slots, size, trailer=MooncakeBackend.slot_trailer_bytes)
    arena.fresh.touch()
    await store.open()
    await store.attach(arena)
    runners, loop = PoolRunners(store, arena, count), asyncio.get_running_loop()
    found: Directions = {(what, one): [] for what in ("write", "read") for one in RUNNERS}
    for number in rounds_within(rounds + 1, SECONDS):
        at = number % len(RUNNERS)
        for one in RUNNERS[at:] + RUNNERS[:at]:
            for what in ("write", "read"):
                began, used = loop.time(), processor_seconds()
                await runners.move(what, one)
                took = loop.time() - began
                cost = (processor_seconds() - used) / (total / 1e9)
                if number:
                    found[what, one].append((total / took, cost))
            await runners.remove(one)
    await store.close()
    arena.close()
    return found


@contextmanager
def over_tcp(wanted: bool) -> Iterator[None]:
    """Objects are moved over TCP inside, as from another node, or in memory."""
    before = os.environ.get(MEMCPY)
    os.environ[MEMCPY] = "0" if wanted else "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[MEMCPY]
        else:
            os.environ[MEMCPY] = before


def pool_rows(*, quick: bool = False) -> tuple[list[Row], dict[str, str]]:
    """Medians beside a real master, over TCP and in memory, and the spread of the ratios. No
    rows where Mooncake is not installed."""
    rows: list[Row] = []
    spread: dict[str, str] = {}
    loads = ((64 << 10, 2 << 20),) if quick else LOADS
    rounds = 1 if quick else ROUNDS
    for tcp in (True, False):
        for size, total in loads:
            try:
                with over_tcp(tcp), master() as one:
                    found = run_terminable(in_pool(one.address, size, total, rounds))
            except StoreError:
                return [], {}
            place = "over TCP" if tcp else "in memory"
            for what in ("write", "read"):
                case = f"Mooncake {place}, {size >> 10} KiB blocks, {what}"
                rows += rows_beside(case, found, what)
                spread[case] = spread_beside(found, what)
    return rows, spread


def rows_beside(case: str, found: Directions, what: str) -> list[Row]:
    """Medians of the back end beside those of the raw client."""
    rates = {one: statistics.median(rate for rate, _ in found[what, one]) / 1e6 for one in RUNNERS}
    return [
        rate_row(f"{case}, {how}", rates[ours], rates[raw], "MB/s", NAMES[raw])
        for ours, raw, how in BESIDE
    ]


def spread_beside(found: Directions, what: str) -> str:
    """The ratios to the raw client in the same round, and processor seconds a GB."""
    parts = []
    for ours, raw, how in BESIDE:
        pairs = zip(found[what, ours], found[what, raw], strict=True)
        ratios = [mine / theirs for (mine, _), (theirs, _) in pairs]
        parts.append(
            f"{how} {min(ratios):.2f} to {max(ratios):.2f} ({statistics.median(ratios):.2f})"
        )
    costs = (
        f"{NAMES[one]} {statistics.median(cost for _, cost in found[what, one]):.2f}"
        for one in RUNNERS
    )
    return f"{', '.join(parts)} by round, processor s/GB: {', '.join(costs)}"
