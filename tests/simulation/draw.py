"""From a seed: a small configuration, a mix of work, and a plan of faults."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvactors.settings import (
    ActorsConfig,
    CacheConfig,
    Config,
    DeviceConfig,
    FlushConfig,
    HostConfig,
    LayoutConfig,
    StorageConfig,
)
from kvactors.settings.ranks import RanksConfig
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.settings.tables import HintsConfig, QuotaConfig, SaltQuota
from kvactors.testing.plan import FaultPlan
from tests.load.ground import SALTS, Mix
from tests.simulation.limits import OVERTAKINGS, draw_limit, draw_limits
from tests.simulation.targets import Targets, draw

BLOCK = 4
"""Tokens a block."""

INDEX = "index"
"""The sink that is AttentionStore's index."""

CRASHES = 3
"""Actors that fail in a run, at most."""


ORDERS = {"clear": 2, "pause": 1, "namespace": 1, "prefetch": 2, "wait_idle": 1, "check": 2}
"""Orders of a run without the parts that tenants share a cache by."""


class Draw(NamedTuple):
    """Everything a run is made of.

    requests: and orders of a client. capacity: objects a store holds. shared: whether the store is a pool that others use as well.
    stop_at: second at which the system is stopped in the middle of everything, None if it may come
    to rest. again: whether a second system then finds what the stores have kept. lags: mean seconds
    of a copy, of an access to the store, of a sink's call, of a message to a rank. limits: see
    `simulation.limits`. token_index: whether AttentionStore's index is a sink.
    """

    seed: int
    config: Config
    sinks: tuple[MemorySinkConfig, ...]
    plan: FaultPlan
    clients: int
    requests: int
    mix: Mix
    capacity: int
    shared: bool
    stop_at: float | None
    again: bool
    lags: tuple[float, float, float, float]
    limits: dict[str, int]
    token_index: bool


def draw_run(seed: int) -> Draw:
    """The run of a seed."""
    rng = random.Random(seed)
    ranks = rng.choice((1, 1, 1, 2, 3))
    blocks = rng.randint(2, 28)
    stored = rng.random() < 0.75
    direct, index = ranks == 1 and rng.random() < 0.25, ranks == 1 and rng.random() < 0.2
    restarts = max(
        draw_limit(rng), draw_limit(rng)
    )  # too few would leave most plans without crashes
    config = Config(
        cache=CacheConfig(
            block_size=BLOCK,
            recompute_last_token=rng.random() < 0.7,
            default_deadline_s=5.0,
            prefill_tokens_per_s=None if direct else _prefill(seed),
        ),
        device=replace(_device(rng, blocks), policy=_policy(seed, "device")),
        layout=LayoutConfig(
            num_layers=rng.choice((1, 2, 3)),
            num_kv_heads=ranks,
            head_dim=4,
            dtype="uint8",
            tensor_parallel=ranks,
        ),
        host=replace(_host(rng, blocks), policy=_policy(seed, "host")),
        storage=_storage(rng, direct=direct) if stored else StorageConfig(),
        flush=FlushConfig(
            mode="flush_only" if rng.random() < 0.08 else "normal",
            timeout_s=0.4,
            retry_min_s=0.02,
            retry_max_s=0.3,
            batch=draw_limit(rng),
        ),
        actors=ActorsConfig(
            channel_bound=draw_limit(rng), drain_timeout_s=20.0, max_restarts_per_minute=restarts
        ),
        ranks=RanksConfig(
            ranks, "memory://simulated", timeout_s=rng.choice((0.1, 0.3)), startup_timeout_s=30.0
        ),
    )
    sinks = tuple(_sink(rng, number) for number in range(rng.choice((0, 1, 1, 2, 3))))
    if config.flush.flush_only and not (sinks or index):  # the mode needs a sink
        sinks = (MemorySinkConfig(name="sink-0"),)
    clients, requests = rng.randint(1, 5), rng.randint(3, 12)
    lags = (
        rng.choice((0.0001, 0.001, 0.005)),
        rng.choice((0.0005, 0.004, 0.02)),
        rng.choice((0.0005, 0.01)),
        rng.choice((0.0001, 0.001, 0.004)),
    )
    capacity = rng.choice((0, draw_limit(rng), draw_limit(rng), draw_limit(rng)))
    targets = _targets(config, sinks, clients, index=index)
    plan = _limited(draw(rng, rng.choice((0, 1, 2, 3, 5, 8, 16)), targets), min(CRASHES, restarts))
    families, longest = (
        rng.randint(1, 6),
        rng.randint(2, blocks + 1 if rng.random() < 0.15 else max(2, blocks // 2)),
    )
    shared = ranks == 1 and not direct and not config.storage.exclusive and rng.random() < 0.3
    stop_at = rng.uniform(0.0, 0.5) if rng.random() < 0.1 else None
    again = stored and rng.random() < 0.2
    return Draw(
        seed,
        config,
        sinks,
        plan,
        clients,
        requests,
        Mix(families, longest, ORDERS, cut=rng.choice((0.0, 0.0, 0.1)), forgotten=0.04),
        capacity,
        shared,
        stop_at,
        again,
        lags,
        draw_limits(rng),
        index,
    )


def _targets(
    config: Config, sinks: tuple[MemorySinkConfig, ...], clients: int, *, index: bool
) -> Targets:
    stored = config.storage.backend != "none" and not config.flush.flush_only
    direct = config.storage.backend == "attention_store"
    pools = (
        (("reader", config.storage.readers), ("writer", config.storage.writers))
        if stored and not direct
        else ()
    )
    workers = ["storage_direct"] if stored and direct else []
    workers += [f"storage_{role}-{number}" for role, count in pools for number in range(count)]
    actors = ("prefix_index", "gpu_swapper", "cpu_evictor", "flush_notifier", *workers)
    names = (*(sink.label for sink in sinks), *([INDEX] if index else []))
    return Targets(
        actors, names, config.ranks.count, clients, stored, stored and direct, span=0.6, steps=120
    )


def _limited(plan: FaultPlan, most: int) -> FaultPlan:
    """Limit the crashes of a plan to the number that the supervisor allows."""
    crashes = [fault for fault in plan.fault if fault.kind == "actor_crash"][most:]
    return FaultPlan(tuple(fault for fault in plan.fault if fault not in crashes))


def _prefill(seed: int) -> float | None:
    """The speed that the engine is said to have, near that of the store."""
    return random.Random(f"prefill {seed}").choice((None, 0.0, 1e3, 3e3, 1e4))


def _policy(seed: int, tier: str) -> Any:
    # Apart from the other choices, so that those of a seed stay the same.
    return random.Random(f"policy of {tier}, {seed}").choice(("lru", "retain"))


def _device(rng: random.Random, blocks: int) -> DeviceConfig:
    ahead = rng.random() < 0.25
    return DeviceConfig(
        num_blocks=blocks,
        high_watermark=0.9 if ahead else 0.0,
        low_watermark=0.7 if ahead else 0.0,
        layerwise=rng.random() < 0.4,
    )


def _host(rng: random.Random, blocks: int) -> HostConfig:
    slots = rng.choice((0, draw_limit(rng), draw_limit(rng), blocks, 2 * blocks))
    mode: Any = rng.choice(("exclusive", "inclusive"))
    marks = rng.random() < 0.25 and slots
    return HostConfig(
        slots=slots,
        transit_slots=draw_limit(rng),
        mode=mode,
        low_watermark=0.5 if marks else 0.0,
        high_watermark=0.8 if marks else 0.0,
    )


def _storage(rng: random.Random, *, direct: bool) -> StorageConfig:
    policy: Any = rng.choice(
        ("write_back", "write_back", "write_through", "write_through_selective", "none")
    )
    if direct and policy == "write_back":
        policy = "write_through"
    exclusive, fetch = rng.random() < 0.4, rng.random() < 0.9
    most, readers, writers = rng.choice((None, None, 2)), rng.choice((1, 2)), rng.choice((1, 2))
    timeout = rng.choice((0.1, 1.0))
    if direct:  # it has no use for the others
        return StorageConfig(
            backend="attention_store", write_policy=policy, fetch=fetch, timeout_s=timeout
        )
    return StorageConfig(
        backend="memory",
        exclusive=exclusive,
        write_policy=policy,
        fetch=fetch,
        max_fetch_blocks=most,
        readers=readers,
        writers=writers,
        timeout_s=timeout,
    )


def _sink(rng: random.Random, number: int) -> MemorySinkConfig:
    tiers: Any = rng.choice(
        (("device", "host", "storage"), ("device", "host"), ("host",), ("device",), ("storage",))
    )
    view: Any = rng.choice(("per_tier", "per_tier", "node"))
    gains: Any = rng.choice(("commit", "commit", "request_finish"))
    return MemorySinkConfig(
        name=f"sink-{number}", tiers=tiers, granularity=view, report_gains_at=gains
    )


# -- the parts that tenants share a cache by, drawn apart from the rest of a run


def with_sharing(drawn: Draw) -> Draw:
    """The same run with forks, hints, pins, quotas, sleeps and clears of one salt."""
    rng = random.Random(drawn.seed * 4001)
    mix = dataclasses.replace(
        drawn.mix,
        forks=rng.choice((0.0, 0.2, 0.6)),
        hints=rng.choice((0.2, 0.8)),
        pins=rng.choice((0.0, 0.3, 0.8)),
        pins_end=rng.random() < 0.5,
        cut=rng.choice((0.0, 0.1)),
        batches=rng.choice((0.05, 0.2, 0.5)),
        hostile=rng.choice((0.0, 0.3)),
        scopes=0.5,
        ordered=0.25,
        orders=ORDERS
        | {"sleep": rng.choice((0, 2, 4)), "clear part": 3, "quota": 3, "unpin": 3, "clear": 1},
    )
    salts = {salt: SaltQuota(_size(rng), _size(rng)) for salt in SALTS if rng.random() < 0.4}
    quota = QuotaConfig(_size(rng), _size(rng), salts)
    if _keeps_quotas(drawn):
        quota = _with_storage(rng, quota)
    hints = HintsConfig(rng.choice((0.1, 0.25, 0.25, 0.5, 1.0)))
    return drawn._replace(config=replace(drawn.config, quota=quota, hints=hints), mix=mix)


def with_crowd(drawn: Draw) -> Draw:
    """The same run without faults, with more clients whose prompts, and pins, take up to the whole
    device."""
    rng = random.Random(drawn.seed * 5003)
    drawn = with_sharing(drawn)
    blocks = drawn.config.device.num_blocks
    mix = dataclasses.replace(
        drawn.mix,
        families=rng.randint(2, 8),
        longest=rng.choice((blocks, max(2, blocks // 2))),
        hints=0.7,
        pins=0.5,
        waits=0.75,
        # a request that waits while the namespace changes is not compared with the pins again
        orders=drawn.mix.orders | {"sleep": 0, "namespace": 0},
    )
    hints = HintsConfig(rng.choice((0.25, 0.5, 1.0)))
    return drawn._replace(
        config=replace(drawn.config, hints=hints),
        mix=mix,
        plan=FaultPlan(),
        stop_at=None,
        clients=rng.randint(4, 10),
        requests=12,
        limits=drawn.limits | {OVERTAKINGS: rng.randint(1, 4)},
    )


def _keeps_quotas(drawn: Draw) -> bool:
    """Whether its store keeps quotas of salts: one of this process, not a pool."""
    config = drawn.config
    stored = config.storage.backend == "memory" and not config.flush.flush_only
    return stored and config.ranks.count == 1 and not drawn.shared


def _with_storage(rng: random.Random, quota: QuotaConfig) -> QuotaConfig:
    salts = {salt: replace(one, storage=_size(rng)) for salt, one in quota.salts.items()}
    return replace(quota, storage=_size(rng), salts=salts)


def _size(rng: random.Random) -> int | None:
    return draw_limit(rng, 1, 24) if rng.random() < 0.6 else None
