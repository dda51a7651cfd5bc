"""Drawn runs of the scheduler's model over AttentionStore: calls that are slow, do not return in
time, fail, or give wrong counts, and resets for new weights in between."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.integrations.fastdeploy.config import Request
from tests.integrations.fastdeploy.invariants import check
from tests.integrations.fastdeploy.scheduler import Scheduler
from tests.integrations.fastdeploy.test_indexes import SDK
from tests.integrations.fastdeploy.test_threads import LIMIT
from tests.support import attentionstore_sdk as stand_in

FAULTS: dict[str, dict[str, Any]] = {
    "ok": {},
    "slow": {"slow": 0.003},
    "stuck": {"stuck": 0.08},
    "broken": {"broken": "the service is gone"},
    "low": {"counts": lambda count: count // 2},
    "odd": {"counts": lambda _: "7"},
    "small": {"capacity": 6},
}
WORKS = {"slow": 0.0, "stuck": 0.0, "broken": "", "counts": None, "capacity": 1 << 16}


def set_fault(name: str) -> None:
    """The fault of every service, one for each version of the weights."""
    for one in stand_in.services.values():
        vars(one).update(WORKS | FAULTS[name])


class Run:
    """Requests over one manager, and the faults between them."""

    def __init__(self, engine: Any, rng: random.Random, model: Any) -> None:
        self.rng, self.model, self.version = rng, model, 0
        self.write_version()
        options = {
            "attention_store": {"sdk": SDK, "write_slice_blocks": rng.choice((1, 2, 100))},
            "storage": {"timeout_s": 0.02},
        }
        self.one = engine(
            backend="attention_store",
            options=options,
            gpu=rng.choice((5, 6, 9)),
            cpu=rng.choice((0, 0, 3)),
            ranks=rng.choice((1, 2)),
            model=str(model),
        )
        self.scheduler: Scheduler = self.one.scheduler(
            chunk=rng.choice((4, 8, 64)), max_running=rng.choice((1, 3))
        )
        self.bases = [[rng.randrange(50) for _ in range(14)] for _ in range(3)]

    def write_version(self) -> None:
        (self.model / "version.yaml").write_text(f"version: RL-STEP{self.version:02}-x\n", "utf-8")

    def add(self, number: int) -> None:
        rng = self.rng
        base = rng.choice(self.bases)
        prompt = [*base[: rng.randrange(1, len(base) + 1)], rng.randrange(50)]
        self.scheduler.add(Request(f"r{number}", prompt), rng.randrange(1, 5))

    def new_weights(self) -> None:
        """The engine stops its requests and resets the manager. Then device memory is lost, and the
        requests begin again."""
        scheduler = self.scheduler
        running = [*scheduler.running, *filter(None, [scheduler.prefilling])]
        scheduler.running.clear()
        scheduler.prefilling = None
        self.version += self.rng.random() < 0.7
        steps = [self.write_version, self.one.manager.reset]
        self.rng.shuffle(steps)  # FastDeploy resets first
        for step in steps:
            step()
        self.one.memory.lose(self.version)
        for request in running:
            scheduler._free(request)
            request.num_computed_tokens = request.num_cached_blocks = 0
            scheduler.waiting.append(request)

    def run(self, requests: int) -> None:
        rng, manager = self.rng, self.one.manager
        for number in range(requests):
            self.add(number)
            for _ in range(rng.randrange(5)):
                self.scheduler.step()
            check(manager)
            if rng.random() < 0.5:
                set_fault(rng.choice(list(FAULTS)))
            if rng.random() < 0.1:
                self.new_weights()
        set_fault("ok")
        until = time.monotonic() + LIMIT
        while self.scheduler.waiting or self.scheduler.running or self.scheduler.prefilling:
            self.scheduler.step()
            assert time.monotonic() < until, f"requests left: {self.scheduler.left()}"
        while not manager.can_allocate_gpu_blocks(manager.num_gpu_blocks):
            assert time.monotonic() < until, "blocks are lost"
            time.sleep(0.002)
        check(manager)
        assert self.scheduler.wrong == []
        assert self.scheduler.failures == []
        assert manager.troubles == ()


@pytest.mark.parametrize("seed", [3, 4, 7, 12, 24])
def test_no_fault_of_attention_store_costs_a_byte_or_a_block(
    engine, service, monkeypatch, tmp_path, seed
):
    monkeypatch.setattr("kvactors.integrations.fastdeploy.device_cache.MARGIN", 0.01)
    model = tmp_path / "model"
    model.mkdir()
    Run(engine, random.Random(seed), model).run(25)
