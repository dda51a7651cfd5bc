"""Engines that are treated badly: requests that are cancelled, and resets at any
step, while copies begin late and reads of storage are slow and fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.interop.engines.stores import offloading, tier
from tests.interop.engines.test_offloading import Alone, Start
from tests.interop.engines.vllm_engine import prompts

pytestmark = pytest.mark.engines_full

SEED = int(os.environ.get("ENGINES_SEED", "11"))
CONVERSATIONS, TURNS = 12, 4
LIMITS = {"max_num_seqs": 4}
TOKENS = 8


def slow(adapter: str, folder: Path) -> dict[str, Any]:
    """Settings of an adapter with slow copies, and slow storage where a store can be named."""
    name = {"spec": "SlowOffloadingSpec", "tier": "SlowTieringSpec"}[adapter]
    extra = (offloading if adapter == "spec" else tier)(128, folder)
    if adapter == "spec":
        extra["storage"] = {"backend": "slow_store:SlowStore", "capacity_blocks": 400}
    return extra | {"spec_name": name, "spec_module_path": "slow_copies"}


def drawn(seed: int) -> list[list[int]]:
    """Prompts, each of them several times, with other prompts between."""
    wanted = prompts(CONVERSATIONS, seed=seed)
    return [wanted[(turn * 7 + i * 5) % len(wanted)] for turn in range(TURNS) for i in range(12)]


@pytest.mark.parametrize(
    ("adapter", "one_process"), [("spec", True), ("tier", True), ("spec", False)]
)
def test_requests_cancelled_and_caches_reset_at_any_step(
    start: Start, alone: Alone, tmp_path: Path, adapter: str, one_process: bool
) -> None:
    """`KVActorsTier` works in the process of the scheduler only."""
    wanted = drawn(SEED)
    right = alone(wanted, max_tokens=TOKENS, **LIMITS)
    engine = start(slow(adapter, tmp_path / "store"), one_process=one_process, **LIMITS)
    for round_ in range(3):
        found = engine.storm(wanted, seed=SEED + round_, resets=round_ > 0, max_tokens=TOKENS)
        tokens = found.pop("tokens")
        print(f"{adapter}, one process: {one_process}, seed {SEED + round_}: {found}")
        wrong = [i for i, each in enumerate(tokens) if each not in (None, right[i])]
        assert not wrong
        assert tokens.count(None) == found["cancelled"] > 0
    assert engine.serve(wanted, max_tokens=TOKENS).tokens == right
    engine.close()
    assert engine.regions() == []
