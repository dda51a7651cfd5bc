"""Engines that are treated badly: cancelled loads, resets at any step, the same prompt many times at
once, stores that cannot be used."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.interop.engines import stores
from tests.interop.engines.stores import ADAPTERS, PROCESSES, offloading
from tests.interop.engines.test_offloading import SMALL, WHOLE, Alone, Start
from tests.interop.engines.vllm_engine import prompts
from tests.interop.environments import InteropError

pytestmark = pytest.mark.engines_full

SEED = int(os.environ.get("ENGINES_SEED", "11"))
CONVERSATIONS, TURNS = 12, 4
LIMITS = {"max_num_seqs": 4}


def slow(adapter: str, folder: Path) -> dict[str, Any]:
    """Settings of an adapter with slow copies, and slow storage where a store can be named."""
    name = {"spec": "SlowOffloadingSpec", "tier": "SlowTieringSpec"}[adapter]
    extra = ADAPTERS[adapter].make(2 * ADAPTERS[adapter].small, folder)
    if adapter == "spec":
        extra["storage"] = {"backend": "slow_store:SlowStore", "capacity_blocks": 400}
    return extra | {"spec_name": name, "spec_module_path": "slow_copies"}


def drawn(seed: int) -> list[list[int]]:
    """Prompts, each of them several times, with other prompts between."""
    wanted = prompts(CONVERSATIONS, seed=seed)
    return [wanted[(turn * 7 + i * 5) % len(wanted)] for turn in range(TURNS) for i in range(12)]


@pytest.mark.parametrize(("adapter", "one_process"), PROCESSES)
def test_requests_cancelled_and_caches_reset_at_any_step(
    start: Start, alone: Alone, tmp_path: Path, adapter: str, one_process: bool
) -> None:
    wanted = drawn(SEED)
    (right,) = alone([wanted], **LIMITS)
    engine = start(slow(adapter, tmp_path / "store"), one_process=one_process, **LIMITS)
    for round_ in range(3):
        found = engine.storm(wanted, seed=SEED + round_, resets=round_ > 0)
        tokens = found.pop("tokens")
        print(f"{adapter}, one process: {one_process}, seed {SEED + round_}: {found}")
        wrong = [i for i, each in enumerate(tokens) if each not in (None, right[i])]
        assert not wrong
        assert tokens.count(None) == found["cancelled"] > 0
    assert engine.serve(wanted).tokens == right
    engine.close()
    assert stores.regions() == []


def test_the_same_prompt_sixteen_times_at_once(start: Start, alone: Alone, tmp_path: Path) -> None:
    (prompt,) = prompts(1)
    (right,) = alone([[prompt] * 16], max_num_seqs=16)
    assert right == [right[0]] * 16
    others = prompts(6, seed=2)
    for name, adapter in ADAPTERS.items():
        engine = start(slow(name, tmp_path / name), max_num_seqs=16)
        assert engine.serve([prompt] * 16).tokens == right
        for connector in (False, adapter.keeps_storage):
            engine.serve(others, at_once=2)
            assert engine.reset(connector=connector)
            again = engine.serve([prompt] * 16)
            assert again.tokens == right
            assert min(each or 0 for each in again.cached) >= WHOLE
        engine.close()


def test_a_second_engine_on_a_store_is_refused_and_the_first_goes_on(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    wanted = prompts(6)
    (right,) = alone([wanted])
    for name, adapter in ADAPTERS.items():
        store = tmp_path / name
        extra = adapter.make(adapter.small, store)
        first = start(extra)
        assert first.serve(wanted, at_once=2).tokens == right
        with pytest.raises(InteropError, match=rf"is in use by process {first.pid}"):
            start(extra)
        assert first.serve(wanted, at_once=2).tokens == right
        # in another namespace two engines share the folder
        below = {"namespace": "other"}
        other = start(adapter.make(adapter.small, store, **below))
        served = other.serve(wanted, at_once=2)
        assert served.tokens == right
        assert max(each or 0 for each in served.cached) <= 64
        first.kill()
        other.close()
        second = start(extra)
        served = second.serve(wanted, at_once=2)
        assert served.tokens == right
        # vLLM hands the last chunks to a secondary tier in a later step
        assert max(each or 0 for each in served.cached) >= WHOLE
        second.close()


def test_an_engine_with_an_unusable_store_names_it_and_ends(
    start: Start, alone: Alone, tmp_path: Path
) -> None:
    wanted = prompts(6)
    (right,) = alone([wanted])
    (tmp_path / "file").write_text("")
    for one_process in (True, False):
        with pytest.raises(InteropError, match=r"StoreError|Engine core initialization failed"):
            start(offloading(SMALL, tmp_path / "file"), one_process=one_process)
        logs = [path.read_text() for path in tmp_path.glob("engine-*.log")]
        named = [log for log in logs if re.search(r"StoreError: .*file/.* Not a directory", log)]
        assert len(named) == (1 if one_process else 2)
    engine = start(offloading(SMALL))
    assert engine.serve(wanted).tokens == right
    engine.close()
    assert stores.regions() == []
