"""From a seed: a small cache of any shape, and the work it gets. Every limit is drawn from 1 to
64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvactors.prefix_index.work import TURN_BLOCKS
from tests.load.ground import SALTS, Mix

MODEL = "model-a"

STATE = {
    "kind": "state",
    "options": {"conv": {"shape": [3, 32], "dtype": "uint8"}, "ssm": {"shape": [8, 4]}},
}
"""The layout of a group of layers with a state."""


def limit(rng: random.Random, low: int = 1, high: int = 64) -> int:
    """A limit, small ones more often."""
    return (
        min(high, max(low, int(low * (high / low) ** rng.random())))
        if low
        else rng.choice((0, limit(rng, 1, high)))
    )


@dataclass
class Draw:
    """tables: the config in TOML's types. recorded: a sink records what is announced. Without any
    sink a request that hits the device ends in one step. turns: inline turns in a pass of the loop.
    part: blocks that one turn handles.
    """

    seed: int
    tables: dict[str, Any]
    clients: int
    threads: int
    mix: Mix
    sinks: tuple[str, ...]
    recorded: bool = True
    turns: int = 128
    part: int = TURN_BLOCKS

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return int(self.tables["cache"]["block_size"])

    @property
    def keeps_quotas(self) -> bool:
        """Whether the store keeps quotas of salts."""
        return self.store in ("file", "memory")

    @property
    def store(self) -> str:
        """The storage back end."""
        return str(self.tables["storage"]["backend"])


def draw(
    seed: int, folder: str, *, store: str | None = None, threads: bool = True, sinks: bool = True
) -> Draw:
    """The cache and the work of a seed. folder: of the file store and of sinks. store: this back
    end in place of a drawn one."""
    rng = random.Random(f"oracle {seed}")
    blocks = limit(rng, 3, 64)
    kind = store or rng.choice(("none", "memory", "memory", "file", "file", "attention_store"))
    weights, clients = rng.random() < 0.35, rng.randint(1, max(1, min(8, blocks // 2)))
    tables: dict[str, Any] = {
        "cache": {
            "block_size": rng.choice((1, 2, 3, 4, 4, 7, 16)),
            "recompute_last_token": rng.random() < 0.7,
            "default_deadline_s": 2.0,
            "namespace": "weights-0",
            "model": MODEL,
        },
        "device": _device(rng, blocks),
        "layout": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": "uint8"},
        "host": _host(rng),
        "storage": _storage(rng, kind, folder),
        "flush": {"batch": limit(rng), "retry_min_s": 0.01, "retry_max_s": 0.1, "timeout_s": 10.0},
        "actors": {
            "channel_bound": limit(rng),
            "drain_timeout_s": 20.0,
            "max_restarts_per_minute": rng.randint(0, 5),
        },
    }
    policies = random.Random(f"policies {seed}")  # apart: the other choices of a seed stay
    for tier in ("device", "host"):
        tables[tier]["policy"] = policies.choice(("lru", "retain", "retain"))
    names = _sinks(rng, tables, folder, seed) if sinks else ()
    steps = random.Random(f"steps {seed}")
    recorded = steps.random() < 0.75
    if not recorded:
        names, tables["flush"]["sinks"] = (), []
    if kind == "attention_store" or "attention_store" in names:
        tables["attention_store"] = {
            "namespace": f"oracle-{seed}",
            "ready_interval_s": 0.01,
            "model_version": "v0",
        }
    mix = Mix(
        families=limit(rng, 1, 32),
        longest=_longest(rng, blocks, clients),
        cut=rng.choice((0.0, 0.05, 0.3)),
        cancelled=rng.choice((0.0, 0.05, 0.3)),
        batches=rng.choice((0.05, 0.2, 0.5)),
        forks=rng.choice((0.0, 0.2, 0.6)),
        hints=rng.choice((0.0, 0.3, 0.8)),
        pins=rng.choice((0.0, 0.3, 0.8)),
        pins_end=rng.random() < 0.4,
        hostile=rng.choice((0.0, 0.0, 0.3)),
        forgotten=rng.choice((0.0, 0.0, 0.03)),
        media=rng.choice((0.0, 0.0, 0.5)),
        scopes=rng.choice((0.0, 0.3, 0.6)),
        orders={
            "clear": rng.choice((0, 2)),
            "pause": rng.choice((0, 0, 1)),
            "namespace": int(weights),
            "sleep": rng.choice((0, 0, 1)),
            "clear part": rng.choice((0, 2)),
            "unpin": 1,
            "prefetch": 2,
            "check": 2,
        },
    )
    made = Draw(
        seed=seed,
        tables=tables,
        clients=clients,
        threads=rng.choice((0, 0, 0, 1, 2)) if threads and not weights else 0,
        mix=mix,
        sinks=names,
        recorded=recorded,
        turns=steps.choice((1, 3, 128)),
        part=rng.choice((1, limit(rng), TURN_BLOCKS, TURN_BLOCKS)),
    )
    tables["hints"] = {"pin_share": rng.choice((0.1, 0.25, 0.25, 0.5, 1.0))}
    if rng.random() < 0.6:
        mix.orders["quota"] = 2
        quota = tables["quota"] = _quota(rng, made)
        quota["salts"] = {salt: _quota(rng, made) for salt in SALTS if rng.random() < 0.5}
    if rng.random() < 0.25:  # place for many leases, or for prompts that take many turns
        tables["device"]["num_blocks"] += 160
        if rng.random() < 0.5:
            mix.longest, made.part = 64, 1
    if not recorded and steps.random() < 0.7:
        share_nothing(made)
    groups = random.Random(f"groups {seed}")
    if kind != "attention_store" and "attention_store" not in names and groups.random() < 0.3:
        _with_groups(groups, made)
    elif kind != "attention_store" and (rate := _prefill(seed)) is not None:
        tables["cache"]["prefill_tokens_per_s"] = rate
    return made


def _prefill(seed: int) -> float | None:
    """The speed that the engine is said to have. Stores of some of them are slow beside it."""
    return random.Random(f"prefill {seed}").choice((None, 0.0, 1e3, 1e4, 1e6))


def _with_groups(rng: random.Random, made: Draw) -> None:
    """Layers with windows or states beside those of the layout, and clients that want the few
    blocks of a group at once. Sinks with a wire format have no pages of windows, and pins are of
    the layout's blocks."""
    made.sinks, made.tables["flush"]["sinks"] = (), []
    made.mix.pins, made.threads = 0.0, 0
    made.mix.waits, made.clients = rng.choice((0.35, 0.9)), rng.choice((made.clients, 8))
    made.mix.families = limit(rng, 1, 4)
    if rng.random() < 0.5:  # requests that wait are served in the end, and hit
        made.mix.cut = made.mix.cancelled = made.mix.scopes = made.mix.media = made.mix.ordered = (
            0.0
        )
    made.tables["host"]["slots"] = made.tables["host"]["slots"] or limit(rng, 0)
    made.tables["cache"]["groups"] = [
        _group(rng, made, kind, f"{kind}-{number}")
        for number, kind in enumerate(rng.choices(("window", "state"), k=rng.choice((1, 2))))
    ]


def _group(rng: random.Random, made: Draw, kind: str, name: str) -> dict[str, Any]:
    """A group of layers, whose device has blocks for the longest prompt and up to as many as that
    of the layout."""
    every, longest, layers = rng.choice((0, 1, 2, 4)), made.mix.longest, rng.randint(1, 3)
    group: dict[str, Any] = {
        "window": {
            "window": limit(rng, 2, 6 * made.block_size),
            "layout": made.tables["layout"] | {"num_layers": layers},
        },
        "state": {"every": every, "layout": {**STATE, "num_layers": layers}},
    }[kind]
    least = longest if kind == "window" else 3 + longest // (every or longest)
    return group | {
        "name": name,
        "kind": kind,
        "num_blocks": limit(rng, least, max(2 * least, made.tables["device"]["num_blocks"])),
        "slots": limit(rng, 1, rng.choice((8, 64))) if made.tables["host"]["slots"] else 0,
        "transit_slots": limit(rng),
        "stored_blocks": rng.choice((None, limit(rng))),
    }


def share_nothing(made: Draw) -> None:
    """Leave out quotas, hints and clears of a salt: their trees end no request in one step."""
    made.mix.hints = made.mix.pins = 0.0
    made.mix.orders |= {"quota": 0, "clear part": 0}
    made.tables.pop("quota", None)


def _quota(rng: random.Random, made: Draw) -> dict[str, Any]:
    tiers = ("device", "host", "storage") if made.keeps_quotas else ("device", "host")
    return {tier: limit(rng) for tier in tiers if rng.random() < 0.7}


def _longest(rng: random.Random, blocks: int, clients: int) -> int:
    """Blocks of the longest prompt: mostly such that all clients are admitted, now and then more
    than the device holds."""
    if rng.random() < 0.06:
        return blocks + 1
    return max(1, min(24, blocks // rng.choice((1, clients, 2 * clients))))


def _device(rng: random.Random, blocks: int) -> dict[str, Any]:
    ahead = rng.random() < 0.25
    return {
        "num_blocks": blocks,
        "high_watermark": 0.9 if ahead else 0.0,
        "low_watermark": 0.6 if ahead else 0.0,
        "layerwise": rng.random() < 0.3,
    }


def _host(rng: random.Random) -> dict[str, Any]:
    slots = limit(rng, 0)
    marks = slots > 0 and rng.random() < 0.25
    found: dict[str, Any] = {
        "slots": slots,
        "transit_slots": limit(rng),
        "mode": rng.choice(("exclusive", "inclusive")),
        "copy_threads": rng.choice((1, 2)),
    }
    return found | ({"low_watermark": 0.5, "high_watermark": 0.8} if marks else {})


def _storage(rng: random.Random, kind: str, folder: str) -> dict[str, Any]:
    policies = ["write_through", "write_through_selective", "none"] + [
        "write_back",
        "write_back",
    ] * (kind != "attention_store")
    found: dict[str, Any] = {"backend": kind}
    if kind == "none":
        return found
    found |= {
        "write_policy": rng.choice(policies),
        "min_hits": rng.randint(1, 3),
        "fetch": rng.random() < 0.9,
    }
    if kind == "attention_store":
        return found
    found |= {
        "capacity_blocks": rng.choice((limit(rng), 4096)),
        "exclusive": rng.random() < 0.3,
        "max_fetch_blocks": rng.choice((4096, 4096, 2, 5)),
        "readers": rng.randint(1, 3),
        "writers": rng.randint(1, 3),
        "timeout_s": 10.0,
    }
    if kind == "file":
        found |= {
            "directory": f"{folder}/store",
            "io_depth": limit(rng, 1, 8),
            "free_space_floor": 0,
        }
    return found


def _sinks(rng: random.Random, tables: dict[str, Any], folder: str, seed: int) -> tuple[str, ...]:
    names = tuple(
        one for one in ("memory", "jsonl", "kv_events", "attention_store") if rng.random() < 0.4
    )
    every = ["device", "host", "storage"]
    made: list[dict[str, Any]] = []
    for name in names:
        sink: dict[str, Any] = {"kind": name}
        if name == "memory":
            sink |= {
                "tiers": rng.choice((["device"], ["host", "storage"], every)),
                "granularity": rng.choice(("per_tier", "node")),
            }
            sink["report_gains_at"] = rng.choice(("commit", "request_finish"))
        elif name == "jsonl":
            sink |= {"tiers": every, "path": f"{folder}/events-{seed}.jsonl"}
        elif name == "kv_events":
            sink |= {
                "endpoint": f"ipc://{folder}/events-{seed}",
                "replay_endpoint": f"ipc://{folder}/replay-{seed}",
                "replay_window": limit(rng),
                "max_blocks": limit(rng),
            }
        made.append(sink)
    tables["flush"]["sinks"] = made
    return names
