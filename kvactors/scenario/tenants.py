"""A tenant that floods the cache beside another one: the other's hits alone, in the flood, and with
a quota of the flood, under both eviction policies."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvactors.config_tables import QuotaConfig
from kvactors.errors import ConfigError
from kvactors.scenario.engine import Engine
from kvactors.scenario.report import Report, Totals
from kvactors.scenario.session import Progress, session
from kvactors.scenario.spec import Scenario, Workload
from kvactors.scenario.workload import random_tokens

QUIET, NOISY = "quiet", "noisy"
POLICIES = ("lru", "retain")
CASES = ("alone", "flood", "quota")

TIMES = 3
"""Requests of each prompt of the flood."""


class Hits(msgspec.Struct):
    """Blocks of a tenant's requests, after the first round."""

    looked_up: int = 0
    found: int = 0

    @property
    def rate(self) -> float:
        """Share of the blocks looked up."""
        return round(self.found / max(1, self.looked_up), 6)


def check_tenants(scenario: Scenario) -> None:
    """Raise ConfigError for a scenario of tenants without what it compares."""
    others = (scenario.fault, scenario.router.enabled, scenario.mooncake.enabled)
    if any(others) or scenario.process.restarts:
        raise ConfigError(
            "workload.kind = 'tenants' opens a cache for each case: it has no fault, router, "
            "mooncake or process.restarts"
        )
    quota = scenario.quota.salts.get(NOISY)
    if quota is None or not isinstance(quota.device, int):
        raise ConfigError(f"workload.kind = 'tenants' needs quota.salts.{NOISY}.device in blocks")
    if not 0 < quota.device < scenario.device.num_blocks:
        raise ConfigError(f"quota.salts.{NOISY}.device must be less than device.num_blocks")
    if scenario.workload.flood < 1:
        raise ConfigError("workload.kind = 'tenants' needs workload.flood")


async def contend(engine: Engine, work: Workload, seed: int, *, flood: int) -> dict[str, Hits]:
    """Serve rounds of the quiet tenant's prompts, and the flood between them.

    Args:
        engine: serves the requests.
        work: `sessions` prompts of `user_tokens` each, `turns` rounds of them.
        seed: of the texts.
        flood: unique prompts of the noisy tenant after each request of the quiet one. Each is
            requested `TIMES` times, so that it looks worth keeping.
    """
    rng = np.random.default_rng(seed)
    prompts = [random_tokens(rng, work.user_tokens) for _ in range(work.sessions)]
    hits = {QUIET: Hits(), NOISY: Hits()}

    async def serve(salt: str, name: str, tokens: Any, *, counts: bool) -> None:
        lease = await engine.serve(name, tokens, salt=salt)
        if counts:
            hits[salt].looked_up += lease.num_tokens // engine.cache.block_size
            hits[salt].found += sum(lease.hits)

    for turn in range(work.turns):
        for number, prompt in enumerate(prompts):
            await serve(QUIET, f"{QUIET}-{number}.{turn}", prompt, counts=turn > 0)
            for one in range(flood):
                unique = random_tokens(rng, work.user_tokens)
                for again in range(TIMES):
                    name = f"{NOISY}-{turn}.{number}.{one}.{again}"
                    await serve(NOISY, name, unique, counts=turn > 0)
    return hits


def case_of(scenario: Scenario, policy: Any, case: str) -> Scenario:
    """The scenario of one case: the quiet tenant alone in the device less the quota, in the flood,
    or in the flood with the quota."""
    replace = msgspec.structs.replace
    device = replace(scenario.device, policy=policy)
    if case == "alone":
        quota = scenario.quota.salts[NOISY].device
        assert isinstance(quota, int)
        device = replace(device, num_blocks=device.num_blocks - quota)
    quotas = scenario.quota if case == "quota" else QuotaConfig()
    return replace(scenario, device=device, quota=quotas)


async def run_tenants(
    scenario: Scenario, seed: int, progress: Progress, *, virtual: bool
) -> Report:
    """Run every case on a fresh cache. The report is of the last one, with the counts of all."""
    totals, tenants = Totals(), dict[str, dict[str, float]]()
    cases = [(policy, case) for policy in POLICIES for case in CASES]
    for policy, case in cases:
        async with session(case_of(scenario, policy, case), virtual=virtual) as one:
            one.totals = totals
            flood = 0 if case == "alone" else scenario.workload.flood
            hits: dict[str, Hits] = {}

            async def work(
                engine: Engine, hits: dict[str, Hits] = hits, flood: int = flood
            ) -> None:
                hits |= await contend(engine, scenario.workload, seed, flood=flood)

            report = await one.run(seed, progress, work)
        for name in ("pending", "divergence"):
            if report.flush[name]:
                totals.complain(f"{policy}, {case}: flush.{name} is {report.flush[name]}")
        totals.errors += [one for one in report.errors if one not in totals.errors]
        tenants[f"{policy}_{case}"] = {name: each.rate for name, each in hits.items()}
    report.errors, report.tenants = totals.errors, tenants
    return report
