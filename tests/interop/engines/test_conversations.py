"""200 random prompts of conversations, more than the device holds at once, with requests that are
preempted and requests that are cancelled."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.interop.engines.stores import ADAPTERS, PROCESSES
from tests.interop.engines.test_offloading import READ, Alone, Start
from tests.interop.engines.vllm_engine import Prompt

pytestmark = pytest.mark.engines_full

SETTINGS = {"max_num_seqs": 6}
TOKENS = 24
SEED = int(os.environ.get("ENGINES_SEED", "3"))


def conversations(count: int, seed: int) -> list[list[Prompt]]:
    """Rounds of prompts: every conversation is longer by some tokens in each round."""
    draw = random.Random(seed)
    system = [draw.randrange(3, 1000) for _ in range(70)]
    histories = [list(system) for _ in range(count)]
    rounds = []
    for _ in range(5):
        for history in histories:
            history += [draw.randrange(3, 1000) for _ in range(draw.randrange(20, 90))]
        order = draw.sample(range(count), count)
        rounds.append([list(histories[i]) for i in order])
    return rounds


@pytest.mark.parametrize(("adapter", "one_process"), PROCESSES)
def test_random_conversations_with_preemption_and_cancelled_requests(
    start: Start, alone: Alone, tmp_path: Path, adapter: str, one_process: bool
) -> None:
    rounds = conversations(40, seed=SEED)
    wanted = alone(rounds, max_tokens=TOKENS, **SETTINGS)
    make, host, _ = ADAPTERS[adapter]
    extra = make(2 * host, tmp_path / "store", capacity_blocks=300)
    engine = start(extra, one_process=one_process, **SETTINGS)
    draw = random.Random(SEED + 1)
    cancelled = 0
    for each, tokens in zip(rounds, wanted, strict=True):
        cancel = {i: draw.randrange(1, 60) for i in draw.sample(range(len(each)), 8)}
        served = engine.serve(each, max_tokens=TOKENS, cancel=cancel).tokens
        cancelled += served.count(None)
        wrong = [i for i, found in enumerate(served) if found not in (None, tokens[i])]
        assert not wrong
        assert engine.reset()
        assert engine.serve(each, max_tokens=TOKENS).tokens == tokens
    metrics = engine.metrics()
    print(f"{cancelled} cancelled, {metrics['vllm:num_preemptions']:.0f} preempted")
    assert cancelled > 0
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics[READ] > 0
    engine.close()
