"""Sequential replay hits exactly like an independent model of leaf-first LRU tiers, request by
request."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvactors.scenario.replay import ReplayConfig, replay

UNLIMITED = 10**9
DEVICE = 12
LONGEST = 10  # no request is larger than the device: the model has no refusals


class ModelTier:
    """Evicts a block only when none of its children is in this tier: of these blocks the least
    recently used, the deepest first."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.used = {}  # block -> (time, -depth)
        self.parent = {}

    def __contains__(self, block):
        return block in self.used

    def remove(self, block):
        del self.used[block], self.parent[block]

    def insert(self, block, used, parent, pinned):
        """Returns the blocks that had to go, or None if nothing may go and the block stays out."""
        victims = []
        if len(self.used) >= self.capacity:
            inner = set(self.parent.values())
            free = [b for b in self.used if b not in inner and b not in pinned]
            if not free:
                return None
            victims = [min(free, key=self.used.__getitem__)]
            self.remove(victims[0])
        self.used[block], self.parent[block] = used, parent
        return victims


class Model:
    def __init__(self, capacities, *, inclusive):
        self.tiers = [ModelTier(capacity) for capacity in capacities]
        self.inclusive = inclusive
        self.last = {}  # block -> (its last use, its parent)
        self.hits = [0, 0, 0]

    def request(self, time, ids):
        for block in ids:
            holder = next((k for k, tier in enumerate(self.tiers) if block in tier), None)
            if holder is None:
                break
            self.hits[holder] += 1
        for depth, block in enumerate(ids):
            self.last[block] = ((time, -depth), ids[depth - 1] if depth else None)
            for tier in self.tiers:
                if block in tier:
                    tier.used[block] = (time, -depth)
        (self._everywhere if self.inclusive else self._once)(ids)

    def _everywhere(self, ids):
        for tier in self.tiers:
            for block in ids:
                if block not in tier and tier.insert(block, *self.last[block], ids) is None:
                    break

    def _once(self, ids):
        for block in ids:
            for tier in self.tiers[1:]:
                if block in tier:
                    tier.remove(block)
        for block in ids:
            if block not in self.tiers[0]:
                self._push(0, block, ids)

    def _push(self, k, block, ids):
        if k < len(self.tiers):
            for victim in self.tiers[k].insert(block, *self.last[block], ids) or ():
                self._push(k + 1, victim, ids)


def random_trace(seed, requests):
    """Chained ids: each request continues a beginning of an earlier one, or starts anew."""
    rng = np.random.default_rng(seed)
    made, fresh, trace = 0, [], [[]]
    for _ in range(requests):
        base = trace[int(rng.integers(0, len(trace)))] if rng.random() < 0.8 else []
        base = base[: int(rng.integers(0, len(base) + 1))] if rng.random() < 0.5 else base
        grow = (
            int(rng.integers(0 if base else 1, LONGEST - len(base) + 1))
            if len(base) < LONGEST
            else 0
        )
        fresh = list(range(made, made + grow))
        made += grow
        trace.append(base + fresh)
    return trace[1:]


def tiny(**tables):
    return ReplayConfig.from_mapping(
        {
            "cache": {"block_size": 4, "recompute_last_token": False},
            "device": {"num_blocks": DEVICE, "policy": "lru"},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": "uint8"},
            "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
            **tables,
        }
    )


def exclusive(host, storage):
    store = {
        "backend": "memory",
        "write_policy": "write_back",
        "exclusive": bool(storage),
        "capacity_blocks": storage or None,
    }
    return tiny(host={"slots": host}, storage=store), Model(
        [DEVICE, host, storage or UNLIMITED], inclusive=False
    )


def inclusive(host, storage):
    store = {
        "backend": "memory",
        "write_policy": "write_through",
        "capacity_blocks": storage or None,
    }
    config = tiny(host={"slots": host, "mode": "inclusive"}, storage=store)
    return config, Model([DEVICE, host, storage or UNLIMITED], inclusive=True)


def host_only(host):
    return tiny(host={"slots": host}), Model([DEVICE, host], inclusive=False)


CASES = {
    "device": lambda: (tiny(), Model([DEVICE], inclusive=False)),
    "exclusive, two tiers": lambda: host_only(20),
    "exclusive, unlimited store": lambda: exclusive(20, 0),
    "exclusive, finite store": lambda: exclusive(20, 30),
    "exclusive, host smaller than device": lambda: exclusive(5, 30),
    "inclusive": lambda: inclusive(20, 30),
    "inclusive, unlimited store": lambda: inclusive(16, 0),
}


async def compare(case, trace, path):
    config, model = CASES[case]()
    path.write_text(
        "".join(
            json.dumps({"timestamp": i, "output_length": 1, "hash_ids": ids}) + "\n"
            for i, ids in enumerate(trace)
        )
    )
    ours = []
    report = await replay(
        path, config, lambda totals: ours.append((totals.device, totals.host, totals.storage))
    )
    for time, ids in enumerate(trace):
        model.request(time, ids)
        assert ours[time] == tuple(model.hits), f"request {time} of {trace}"
    assert report.requests == len(trace)
    assert report.verified_blocks == model.hits[1] + model.hits[2]
    assert report.corrupt_blocks_served == 0
    assert report.flush["divergence"] == report.flush["pending"] == 0
    assert report.errors == []
    return model


@pytest.mark.parametrize("case", CASES)
async def test_hits_of_every_tier_equal_the_models(case, tmp_path):
    model = await compare(case, random_trace(7, 300), tmp_path / "trace.jsonl")
    assert all(model.hits[: len(model.tiers)])  # every tier was hit


@pytest.mark.parametrize("case", CASES)
@hypothesis_settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 60))
async def test_hits_equal_on_any_trace(case, tmp_path, seed, requests):
    await compare(case, random_trace(seed, requests), tmp_path / "trace.jsonl")
