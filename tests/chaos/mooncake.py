"""Mooncake's master is killed and started again empty, and stopped for a while, under load."""

from __future__ import annotations

from typing import Any

import anyio
from anyio.to_thread import run_sync

from kvactors.testing.faults import Fault, Kind
from kvactors.testing.plan import carry_out
from tests.chaos.record import Setting, Tally
from tests.chaos.rest import settings
from tests.chaos.worker import worker
from tests.support.injectors import FaultyMaster


async def run(setting: Setting, tally: Tally) -> None:
    """Both in any order. Blocks are misses until the pool is back, and nothing is wrong or left
    over."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        tally.unavailable(
            f"Mooncake's client cannot be loaded ({error}): pip install '/path/to/kvactors[mooncake]'"
        )
        return
    master = FaultyMaster()
    try:
        await run_sync(master.start)
        await under_load(master, pool_of(master), setting, tally)
    finally:
        with anyio.CancelScope(shield=True):
            await run_sync(master.kill)


def pool_of(master: FaultyMaster) -> dict[str, Any]:
    """The settings of its store."""
    pool = {
        "master_server_address": master.address,
        "local_hostname": "127.0.0.1",
        "global_segment_size": "64MB",
        "local_buffer_size": "16MB",
        "timeout_s": 1.0,
    }
    return {"backend": "mooncake", "mooncake": pool}


async def under_load(
    server: FaultyMaster, storage: dict[str, Any], setting: Setting, tally: Tally
) -> None:
    """The faults, in a random order."""
    mapping = settings(setting.folder)
    mapping["storage"] = {**storage, "write_policy": "write_through"}
    kinds: list[Kind] = ["store_down", "store_hang"]
    kinds *= setting.times(1, 2)
    setting.rng.shuffle(kinds)
    async with worker(mapping, setting, tally) as life:
        await life.reach(40)
        for kind in kinds:
            await setting.moment(0.3, 2.0)
            tally.faults += 1
            await carry_out(server, Fault(kind, duration=setting.seconds(0.2, 2.0)))
        await life.reach(0, stored=1)
        await setting.moment(0.3, 2.0)
        await life.rest()
