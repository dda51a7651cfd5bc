"""AttentionStore behind simulated ranks: each has its own shard, and ranks are lost, cut and silent
while blocks move."""

from __future__ import annotations

from msgspec.structs import replace

from kvactors.settings import StorageConfig
from kvactors.testing.plan import FaultPlan
from tests.simulation.draw import Draw, draw_run
from tests.simulation.run import run_seed

ELSEWHERE = ("store", "disk", "bit", "torn")
"""Faults of stores that the ranks do not have here."""


def with_shards(seed: int) -> Draw | None:
    """The run of a seed with AttentionStore as the ranks' store; None for a run without ranks."""
    drawn = draw_run(seed)
    config = drawn.config
    if config.ranks.count == 1 or config.flush.flush_only:
        return None
    timeout = min(1.0, config.storage.timeout_s)
    storage = StorageConfig(
        backend="attention_store", write_policy="write_through", timeout_s=timeout
    )
    faults = [fault for fault in drawn.plan.fault if not fault.kind.startswith(ELSEWHERE)]
    plan = FaultPlan(
        tuple(f for f in faults if not (f.kind == "actor_crash" and f.target.startswith("storage")))
    )
    cache = replace(config.cache, model="m", prefill_tokens_per_s=None)
    return drawn._replace(
        config=replace(config, storage=storage, cache=cache), plan=plan, again=False
    )


RUNS = {seed: drawn for seed in range(1, 70) if (drawn := with_shards(seed)) is not None}


def test_nothing_is_violated_and_both_paths_are_used():
    reports = {seed: run_seed(seed, drawn) for seed, drawn in list(RUNS.items())[:20]}
    assert {seed: report.violations for seed, report in reports.items() if report.violations} == {}
    for kind in ("DeviceFetched", "DeviceSaved"):
        assert (
            sum(
                one.seen.get(f"message storage_direct cpu_evictor {kind}", 0)
                for one in reports.values()
            )
            > 30
        )
