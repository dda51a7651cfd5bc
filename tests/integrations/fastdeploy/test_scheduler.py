"""Whole runs of the scheduler's model: every cached byte that a request starts from is compared."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integrations.fastdeploy.conftest import memory_of_gpu
from tests.integrations.fastdeploy.oracle import ModelMemory
from tests.integrations.fastdeploy.simulation import KINDS, simulate


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_drawn_runs_have_no_wrong_bytes_and_lose_no_blocks(rng):
    simulate(rng, requests=8)


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_drawn_runs_of_seeds(seed):
    simulate(random.Random(seed), requests=15)


def test_storage_that_works_again_is_used_again(engine, faults):
    one = engine(gpu=4, cpu=0, file=True, options={"storage": {"timeout_s": 5.0}})
    faults.mode = "refuses"
    one.serve("a", list(range(8)))
    assert one.manager.statistics().failed_blocks == 2
    faults.mode = "ok"
    one.serve("b", list(range(8)))
    assert one.manager.statistics().written_blocks == 2


PLAIN: dict[str, Any] = {"blocks": 8, "cpu": 4, "size": 4, "backend": "file", "drafts": 0}
"""Sizes of a run whose tensors are special."""


@pytest.mark.parametrize("given", KINDS.values(), ids=KINDS)
def test_tensors_of_every_kind(given):
    found = simulate(random.Random(3), requests=30, **PLAIN | given)
    assert found.hits["cpu"] > 0
    assert found.hits["storage"] > 0


def test_tensors_of_paddle():
    paddle = pytest.importorskip("paddle")
    kept = []

    def make(shape):
        kept.append(paddle.zeros(shape, dtype="uint8"))
        return kept[-1]

    def view(tensor):
        found = np.from_dlpack(tensor)
        found.flags.writeable or found.setflags(write=True)
        return found

    memory = partial(ModelMemory, make=make, view=view)
    found = simulate(random.Random(5), requests=20, make_memory=memory, **PLAIN)
    assert found.hits["cpu"] + found.hits["storage"] > 0


def test_runs_over_tensors_of_a_gpu(gpu):
    memory = memory_of_gpu(gpu)
    found = simulate(
        random.Random(5), requests=30, make_memory=memory, stream=lambda: gpu.stream, **PLAIN
    )
    assert found.hits["cpu"] > 0
    assert found.hits["storage"] > 0
