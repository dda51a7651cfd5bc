"""Tensor-parallel ranks in separate processes: killed, stopped, cut off, while requests are served
over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio

from kvactors.cache import KVCache
from kvactors.errors import DeviceError, LeaseEnded, RankLost
from kvactors.opening import open_cache
from kvactors.settings import Config
from kvactors.testing.faults import Fault, Kind
from kvactors.testing.plan import carry_out
from tests.chaos.load import Load
from tests.chaos.record import Setting, Tally, reached
from tests.chaos.rest import at_rest
from tests.load.ground import Row
from tests.support.rank_model import ProcessModel, WorkerGone
from tests.support.rank_process import RankProcess
from tests.support.sim_rank import hang_up

BLOCK, RANKS, CLIENTS = 8, 2, 3
KINDS: tuple[Kind, ...] = ("rank_lost", "rank_silent", "rank_silent", "rank_cut", "rank_cut")

BACK = 30.0
"""Seconds in which all ranks must be back after a fault, and the cache at rest after all of
them."""


def config_of(setting: Setting) -> Config:
    """Small tiers, so that everything moves, and a sink that follows each of them."""
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK, "default_deadline_s": 10.0},
            "device": {"num_blocks": 24, "layerwise": setting.rng.random() < 0.5},
            "host": {
                "slots": 24,
                "transit_slots": 32,
                "mode": setting.rng.choice(["exclusive", "inclusive"]),
            },
            "layout": {
                "num_layers": 2,
                "num_kv_heads": 4,
                "head_dim": 32,
                "tensor_parallel": RANKS,
            },
            "storage": {
                "backend": "file",
                "directory": str(setting.folder / "store"),
                "capacity_blocks": 200,
            },
            "ranks": {
                "count": RANKS,
                "endpoint": f"unix://{setting.folder}/ranks",
                "timeout_s": 0.3,
            },
            "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
        }
    )


async def run(setting: Setting, tally: Tally) -> None:
    """Faults under load: no wrong byte, nothing left over, indexes right."""
    config = config_of(setting)
    workers = [RankProcess(config, rank) for rank in range(RANKS)]
    async with AsyncExitStack() as stack:
        for worker in workers:
            stack.push_async_callback(worker.kill)
            await worker.start()
        cache = await stack.enter_async_context(open_cache(config))
        async with ranked_load(cache, workers, setting, tally).running():
            for _ in range(setting.times(5, 15)):
                await setting.moment(0.05, 0.6)
                await _inject_fault(cache, setting.rng.choice(workers), setting, tally)
            group = cache.system.ranks
            assert group is not None
            if not await reached(lambda: group.healthy, BACK):
                tally.complain(f"not all ranks are back after {BACK:.0f} s")
            await setting.moment(0.3, 1.0)
        await at_rest(cache, tally, BACK)


class RankedLoad(Load):
    """Wrong blocks are a violation, unless the cache reports that a rank lost its memory."""

    faulty = True

    async def wrong(self, row: Row, what: str) -> None:
        await anyio.sleep(0.05)
        await row.lease.commit(0)
        await super().wrong(row, what)


async def _inject_fault(
    cache: KVCache, victim: RankProcess, setting: Setting, tally: Tally
) -> None:
    tally.faults += 1
    kind = setting.rng.choice(KINDS)
    tally.count(kind, 1)
    if kind == "rank_cut" and cache.system.ranks is not None:
        hang_up(cache.system.ranks, victim.rank)
        return
    seconds = setting.seconds(0.05, 1.0) if kind == "rank_silent" else 0.0
    await carry_out(victim, Fault(kind, duration=seconds))


def ranked_load(
    cache: KVCache, workers: Sequence[RankProcess], setting: Setting, tally: Tally
) -> Load:
    """Clients whose engine computes every block on every rank. A lost rank may end a request."""
    excused = (WorkerGone, RankLost, LeaseEnded, DeviceError)
    model = ProcessModel(workers)
    return RankedLoad(cache, tally, setting.seed, clients=CLIENTS, model=model, excused=excused)
