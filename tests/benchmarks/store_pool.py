"""A Mooncake pool through the back end beside its raw client, in the benchmark `store`."""

from __future__ import annotations

import os
import time
from statistics import median
from unittest import mock

from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.signals import run_terminable
from kvactors.storage.backend import SlotViews
from kvactors.storage.header import PoolHeaders
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import MooncakeBackend
from kvactors.storage.mooncake_client import MooncakeClient
from tests.benchmarks.frame import Row, rate_row
from tests.support.masters import master

ROUNDS = 9
LOADS = ((2 << 20, 256 << 20), (64 << 10, 128 << 20), (4 << 10, 16 << 20))
"""Bytes of an object, and of a round."""

BATCH_BYTES, BATCH = 64 << 20, 1024
"""Bytes and objects of a batch at most. Each runner moves the same batches. The client rejects
transfers beyond those that it queues for a peer, which are 1,024 by default."""

MEMCPY = "MC_STORE_MEMCPY"
"""Variable of the client: with 0 it moves objects in the same process over TCP as well."""

RUNNERS = ("ours without checksums", "ours with checksums", "raw client")
CALLS = {"write": "batch_put_from_multi_buffers", "read": "batch_get_into_multi_buffers"}
"""Calls of the client by direction."""


class PoolRunners:
    """The same objects through the back end, without checksums of the payloads and with them, and
    through its raw client.

    Args:
        store: the back end, open.
        arena: registered with the client.
        count: objects of a round.
    """

    def __init__(self, store: MooncakeBackend, arena: Arena, count: int) -> None:
        self._store, self._arena = store, arena
        self._keys = [i.to_bytes(32, "little") for i in range(count)]
        self._headers = {
            runner: PoolHeaders(store.digest, store.block_bytes, runner == RUNNERS[1])
            for runner in RUNNERS[:2]
        }

    async def move(self, runner: str, what: str) -> None:
        """All objects, batch by batch. RuntimeError if one was lost."""
        for start in range(0, len(self._keys), self._arena.num_slots):
            keys = self._keys[start : start + self._arena.num_slots]
            call = self._raw if runner == RUNNERS[2] else self._ours
            if not await call(runner, what, keys):
                raise RuntimeError("an object was lost")

    async def _ours(self, runner: str, what: str, keys: list[bytes]) -> bool:
        self._store.headers = self._headers[runner]
        call = self._store.write if what == "write" else self._store.read
        report = await call(keys, SlotViews(self._arena, range(len(keys))), lambda: False)
        return set(report.outcomes) == {Outcome.OK}

    async def _raw(self, _: str, what: str, keys: list[bytes]) -> bool:
        """One call of the client, and nothing else."""
        stride = self._arena.stride
        pointers = [[self._arena.address + slot * stride] for slot in range(len(keys))]
        sizes = [[self._store.block_bytes]] * len(keys)
        arguments, method = ([self._raw_name(key) for key in keys], pointers, sizes), CALLS[what]
        codes = await self._store.client.call(
            lambda store: list(getattr(store, method)(*arguments)), [-1]
        )
        return min(codes) >= 0

    @staticmethod
    def _raw_name(key: bytes) -> str:
        return "raw/" + key.hex()

    async def remove(self, runner: str) -> None:
        """The objects of a round."""
        name = self._raw_name if runner == RUNNERS[2] else self._store.name
        gone = [name(key) for key in self._keys]
        await self._store.client.call(lambda store: store.batch_remove(gone, True), None)


async def in_pool(
    address: str, size: int, total: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """MB/s by runner and direction, in rounds of all runners, in another order each time. The first
    round is not counted."""
    count, slots = total // size, max(4, min(min(total, BATCH_BYTES) // size, BATCH))
    config = MooncakeConfig(
        master_server_address=address,
        local_hostname="127.0.0.1",
        global_segment_size=f"{(total * 5 >> 20) + 64}MB",
        local_buffer_size="16MB",
    )
    store = MooncakeBackend(
        MooncakeClient(config), StoreIdentity("bench", "default", bytes(32)), size
    )
    arena = Arena(slots, size, trailer=MooncakeBackend.slot_trailer_bytes)
    arena.fresh.touch()
    await store.open()
    await store.attach(arena)
    runners = PoolRunners(store, arena, count)
    found: dict[tuple[str, str], list[float]] = {
        (one, what): [] for one in RUNNERS for what in CALLS
    }
    for number in range(rounds + 1):
        at = number % len(RUNNERS)
        for one in RUNNERS[at:] + RUNNERS[:at]:
            for what in CALLS:
                began = time.perf_counter()
                await runners.move(one, what)
                if number:
                    found[one, what].append(total / (time.perf_counter() - began) / 1e6)
            await runners.remove(one)
    await store.close()
    arena.close()
    return found


def pool_rows(*, quick: bool = False) -> list[Row]:
    """Medians beside a real master, over TCP. No rows where Mooncake is not installed."""
    rows: list[Row] = []
    loads = ((64 << 10, 2 << 20),) if quick else LOADS
    for size, total in loads:
        try:
            with mock.patch.dict(os.environ, {MEMCPY: "0"}), master() as one:
                found = run_terminable(in_pool(one.address, size, total, 1 if quick else ROUNDS))
        except StoreError:
            return []
        for what in CALLS:
            limit = median(found[RUNNERS[2], what])
            for runner in RUNNERS[:2]:
                how = runner.removeprefix("ours ")
                case = f"Mooncake, {size >> 10} KiB, {what}, {how}"
                rows.append(rate_row(case, median(found[runner, what]), limit, "MB/s", RUNNERS[2]))
    return rows
