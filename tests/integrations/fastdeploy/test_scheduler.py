"""Whole runs of the scheduler's model: every cached byte that a request starts from is compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvactors.integrations.fastdeploy import PrefixCacheManager
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request, make_config
from tests.integrations.fastdeploy.conftest import RESERVE, Engine, memory_of_gpu
from tests.integrations.fastdeploy.invariants import check
from tests.integrations.fastdeploy.oracle import ModelMemory
from tests.integrations.fastdeploy.simulation import simulate


def drive(one: Any, seed: int, requests: int = 40, fault: Any = lambda rng: None) -> Any:
    """Requests with shared prefixes, at random times, some of them aborted."""
    rng = random.Random(seed)
    scheduler = one.scheduler(chunk=rng.choice((4, 8, 64)), max_running=rng.choice((1, 3, 6)))
    longest = min(24, (one.manager.num_gpu_blocks - 1) * BLOCK_SIZE - 6)
    started: list[Request] = []
    bases = [[rng.randrange(50) for _ in range(longest)] for _ in range(4)]
    for number in range(requests):
        base = rng.choice([*bases, *(request.tokens for request in started[-2:])])
        prompt = [*base[: rng.randrange(1, len(base) + 1)], rng.randrange(50)]
        prompt = prompt[:longest]
        media = None
        if rng.random() < 0.2 and len(prompt) > 3:
            media = [(1, 2, rng.choice(("cat", "dog")))]
        request = Request(f"r{number}", prompt, media)
        started.append(request)
        scheduler.add(request, max_tokens=rng.randrange(1, 7))
        for _ in range(rng.randrange(4)):
            scheduler.step()
        fault(rng)
        if rng.random() < 0.15:
            scheduler.abort(rng.choice(started))
    fault(None)
    scheduler.run()
    check(one.manager)
    assert scheduler.wrong == []
    assert scheduler.failures == []
    assert one.available == one.manager.num_gpu_blocks, "blocks are lost"
    assert one.manager.statistics().requests == 0
    return scheduler


@pytest.mark.parametrize(
    ("seed", "gpu", "cpu", "file", "requests"),
    [
        *((seed, 4 + 2 * seed, (0, 1, 5)[seed % 3], False, 40) for seed in range(6)),
        *((seed, 6 + seed, cpu, True, 40) for seed in range(3) for cpu in (0, 3)),
        (11, 64, 16, False, 120),
    ],
)
def test_cached_bytes_of_any_tier_are_the_models(engine, seed, gpu, cpu, file, requests):
    options = {"staging_slots": 1 + seed} if file else None
    one = engine(gpu, cpu, file=file, options=options, environ={RESERVE: str(seed % 3)})
    scheduler = drive(one, seed, requests)
    assert sum(tokens for _, tokens, _ in scheduler.hits) > 0
    found = one.manager.statistics()
    assert (found.storage_tokens > 0, found.written_blocks > 0) == (file, file)


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_drawn_runs_have_no_wrong_bytes_and_lose_no_blocks(rng):
    simulate(rng, requests=8)


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_drawn_runs_of_seeds(seed):
    simulate(random.Random(seed), requests=15)


@pytest.mark.parametrize(
    ("ranks", "layers", "roles", "drafts"),
    [
        (2, 2, ("key_caches", "value_caches"), None),
        (1, 3, ("key_caches", "value_caches"), 1),
        (1, 2, ("key_caches",), None),
        (2, 2, ("key_caches", "indexer_caches"), None),
        (1, 1, ("key_caches", "value_caches", "key_cache_scales", "value_cache_scales"), None),
        (3, 1, ("key_caches", "value_caches"), None),
    ],
    ids=["two ranks", "drafts", "MLA", "DSA", "scales", "three ranks"],
)
def test_tensors_of_every_kind(engine, ranks, layers, roles, drafts):
    one = engine(gpu=6, cpu=4, file=True, ranks=ranks, layers=layers, roles=roles, drafts=drafts)
    drive(one, 3)
    found = one.manager.statistics()
    assert found.cpu_tokens + found.storage_tokens > 0


def test_a_long_run_over_64_blocks(engine):
    drive(engine(gpu=64, cpu=16, environ={RESERVE: "1"}), 11, requests=120)


def test_storage_that_works_again_is_used_again(engine, faults):
    one = engine(gpu=4, cpu=0, file=True, options={"storage": {"timeout_s": 5.0}})
    faults.mode = "refuses"
    one.serve("a", list(range(8)))
    assert one.manager.statistics().failed_blocks == 2
    faults.mode = "ok"
    one.serve("b", list(range(8)))
    assert one.manager.statistics().written_blocks == 2


def test_tensors_of_paddle(engine):
    paddle = pytest.importorskip("paddle")
    kept = []

    def make(shape):
        kept.append(paddle.zeros(shape, dtype="uint8"))
        return kept[-1]

    def view(tensor):
        found = np.from_dlpack(tensor)
        found.flags.writeable or found.setflags(write=True)
        return found

    memory = ModelMemory(6, BLOCK_SIZE, make=make, view=view)
    one = engine(gpu=6, cpu=3, file=True, memory=memory)
    drive(one, 5, requests=20)
    assert one.manager.statistics().written_blocks > 0


def test_runs_over_tensors_of_a_gpu(gpu, tmp_path):
    config = make_config(6, 3, backend="file")
    memory = memory_of_gpu(gpu, 6)
    manager = PrefixCacheManager(
        config,
        1,
        tensors=memory.tensors,
        stream=lambda: gpu.stream,
        environ={RESERVE: "0", "FILE_BACKEND_STORAGE_DIR": str(tmp_path)},
    )
    manager.attach()
    drive(Engine(manager, memory, config), 0, requests=30)
    found = manager.statistics()
    assert found.cpu_tokens > 0
    assert found.storage_tokens > 0
    manager.close()
