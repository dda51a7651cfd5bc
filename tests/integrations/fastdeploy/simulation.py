"""Drawn runs of the scheduler's model over one manager after another, with faults.

A run draws the sizes (device, host, block, ranks, chunks, drafts, decode reserve), the requests and
the faults: a store that is slow, refuses, damages or is gone, AttentionStore with calls that are
slow, return late, fail or count wrongly, copies that fail, a rank that does not respond (its copies
do not end, and the engine restarts), an engine that restarts, device memory that is lost, and new
weights. Every byte that a request starts from is compared with the model's.

`python -m tests.integrations.fastdeploy.simulation --first 0 --seeds 300`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import cyclopts
import numpy as np

from kvactors.errors import DeviceError, NoRoom
from kvactors.integrations.fastdeploy import (
    CacheController,
    CacheManager,
    PrefixCacheManager,
    device_cache,
)
from kvactors.integrations.fastdeploy.lower_tiers import RankCopies
from kvactors.integrations.fastdeploy.v1_controller import LayerDoneCounter
from kvactors.storage import factory
from kvactors.storage.backend import ReadReport
from kvactors.storage.messages import Outcome
from tests.integrations.fastdeploy.attention import Attention
from tests.integrations.fastdeploy.config import Request, make_config
from tests.integrations.fastdeploy.invariants import check
from tests.integrations.fastdeploy.oracle import ModelLayout, ModelMemory
from tests.integrations.fastdeploy.scheduler import Scheduler, V1Scheduler
from tests.support import attentionstore_sdk as stand_in
from tests.tier_cache.faulty_stores import MODES, Faults
from tests.tier_cache.stores import SharedStore

numbers = count()


def of_other_shapes(shape: tuple[int, ...]) -> Any:
    """A tensor: those of every second layer have another shape and type."""
    blocks, _, size, word = shape
    if next(numbers) // 2 % 2:  # key and value
        return np.zeros((blocks, 3, size, word // 2), np.float16)
    return np.zeros(shape, np.uint8)


KINDS: dict[str, dict[str, Any]] = {
    "two ranks": {"ranks": 2, "layers": 2},
    "drafts": {"layers": 3, "drafts": 2, "draft_layers": 1},
    "different layers": {"layers": 2, "make_memory": partial(ModelMemory, make=of_other_shapes)},
    "MLA": {"layers": 2, "roles": ("key_caches",)},
    "MLA with scales": {"roles": ("key_caches", "key_cache_scales")},
    "DSA": {"ranks": 2, "roles": ("key_caches", "indexer_caches")},
    "scales": {"roles": ("key_caches", "value_caches", "key_cache_scales", "value_cache_scales")},
    "three ranks": {"ranks": 3, "layers": 1},
}
"""Tensors that `simulate` makes."""

POOL = {"MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE", "MOONCAKE_MASTER_SERVER_ADDR": "10.0.0.1:1"}
"""Of a pool that is not asked: `made_pool` is in its place."""

STEPS = 20_000
LIMIT = 30.0
"""Seconds until calls that are late return their blocks."""

SDK_FAULTS: dict[str, dict[str, Any]] = {
    "ok": {},
    "slow": {"slow": 0.003},
    "stuck": {"stuck": 0.08},
    "broken": {"broken": "the service is gone"},
    "low": {"counts": lambda count: count // 2},
    "odd": {"counts": lambda _: "7"},
    "small": {"capacity": 6},
}
SDK_WORKS = {"slow": 0.0, "stuck": 0.0, "broken": "", "counts": None, "capacity": 1 << 16}


def set_sdk_fault(name: str) -> None:
    """The fault of every service of AttentionStore, one for each version of the weights."""
    for one in stand_in.services.values():
        vars(one).update(SDK_WORKS | SDK_FAULTS[name])


class FaultyPool(Faults, SharedStore):
    """A pool that outlives an engine, with faults."""

    async def read_damaged(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Any
    ) -> ReadReport:
        for view in views:
            view[:] = b"\xee" * view.nbytes
        await self.remove(keys)
        return ReadReport(bytes([Outcome.CORRUPT]) * len(keys), [])


def made_pool(config: Any, _model: str, digest: bytes, size: int) -> FaultyPool:
    """In the place of `make_backend`."""
    return FaultyPool(config, digest, size)


class FaultyCopies:
    """Copies that fail, or do not end, on demand."""

    def __init__(self) -> None:
        self.fails = {"store": False, "load": False}
        self.hangs = False

    def around(self, name: str) -> Any:
        good = getattr(RankCopies, name)

        def copy(copies: Any, blocks: Any, slots: Any) -> str:
            if self.hangs:
                raise DeviceError("a rank is not responding")
            return "injected" if self.fails[name] else good(copies, blocks, slots)

        return copy

    def of_layers(self) -> Any:
        good = LayerDoneCounter.wait_for_layer

        def wait_for_layer(counter: Any, layer: int, timeout: float | None = None) -> bool:
            if self.hangs or any(self.fails.values()):
                raise DeviceError("injected")
            return good(counter, layer, timeout)

        return wait_for_layer


class Simulation:
    """One run over one manager.

    Args:
        rng: draws everything.
        folder: for the model's `version.yaml`.
        given: sizes and other attributes in place of drawn ones.

    Attributes:
        make_memory: makes the cache tensors: arguments of `ModelMemory`.
        stream: of the copies.
        hits: tokens found, by tier.
        restarts: engines that ended early.
    """

    make_memory: Any = ModelMemory
    stream: Any = staticmethod(lambda: None)
    roles: Any = ("key_caches", "value_caches")

    def __init__(self, rng: Any, folder: Path, **given: Any) -> None:
        self.rng, self.folder = rng, folder
        self.copies = FaultyCopies()
        self.version = 0
        self.hits = {"gpu": 0, "cpu": 0, "storage": 0}
        self.restarts = self.preemptions = 0
        self._draw_sizes()
        vars(self).update(given)

    def _draw_sizes(self) -> None:
        rng = self.rng
        self.size = rng.choice((1, 2, 4, 8))
        self.blocks = rng.randrange(2, 17) if rng.random() < 0.8 else rng.randrange(17, 65)
        self.cpu = rng.choice((0, 0, 1, 2, 5, 16, 64))
        self.backend = rng.choice((None, None, "file", "file", "file", "attention_store"))
        self.ranks, self.layers = rng.choice((1, 1, 2)), rng.choice((1, 2))
        self.drafts = rng.choice((0, 0, 1, 3))
        self.draft_layers = 1 if self.drafts and self.layers > 1 else 0
        self.reserve = rng.choice((0, 0, 1, 16))
        self.staging = rng.choice((1, 3, 32))
        self.chunk = self.size * rng.choice((1, 2, 64))
        self.max_running = rng.choice((1, 2, 5))

    # -- the engine

    def open(self) -> None:
        """A new engine: its memory holds nothing that a request may use."""
        config = make_config(
            self.blocks,
            self.cpu,
            backend=self.backend,
            drafts=self.draft_layers if self.drafts else None,
            model=str(self.folder),
            block_size=self.size,
        )
        options: dict[str, Any] = {}
        if self.backend == "attention_store":
            options["storage"] = {"timeout_s": 0.02}
            slices = self.rng.choice((1, 2, 100))
            options["attention_store"] = {"sdk": stand_in.__name__, "write_slice_blocks": slices}
        elif self.backend:
            options["storage"] = {"timeout_s": 5.0, "slot_timeout_s": 0.002}
            options |= {"fetch_wait_s": 0.02, "staging_slots": self.staging}
        self.memory = self.make_memory(
            self.blocks, self.size, ranks=self.ranks, layers=self.layers, roles=self.roles
        )
        self.memory.lose(self.version)
        self.manager = PrefixCacheManager(
            config,
            self.ranks,
            tensors=self.memory.tensors,
            stream=self.stream,
            environ={"FILE_BACKEND_STORAGE_DIR": "/unused"},
            options=options,
        )
        self.manager.attach()
        rng = self.rng
        self.scheduler = Scheduler(
            self.manager,
            self.memory,
            config,
            chunk=self.chunk,
            max_running=self.max_running,
            next_token=lambda _: rng.randrange(3),
            drafts=self.drafts,
            accepted=lambda _: rng.randrange(self.drafts + 1),
            reserve=self.reserve,
        )
        self.ends: list[Request] = []
        self.scheduler.finisher = self.ends.append

    def restart(self) -> None:
        """The engine ends, and clients send the requests that it had not finished again."""
        self.check_bytes()
        limits, before = self.scheduler.limits, self.scheduler
        unfinished = [*before.waiting, *before.running]
        if before.prefilling is not None:
            unfinished.append(before.prefilling)
        self.close()
        self.copies.hangs = False
        set_sdk_fault("ok")
        self.restarts += 1
        self.open()
        for request in unfinished:
            again = Request(request.request_id, request.prompt_token_ids)
            again.multimodal_inputs = request.multimodal_inputs
            self.scheduler.add(again, limits[request.request_id])

    def lose_memory(self, *, new_weights: bool = False) -> None:
        """Device memory is lost, or the weights are new: every request begins again."""
        scheduler = self.scheduler
        self.end_some(len(self.ends))
        running = [*scheduler.running, *filter(None, [scheduler.prefilling])]
        scheduler.running.clear()
        scheduler.prefilling = None
        if new_weights:
            self.version += 1
        steps = [self.write_version, self.reset]
        self.rng.shuffle(steps)  # FastDeploy resets first
        for step in steps:
            step()
        self.memory.lose(self.version)
        for request in running:
            scheduler._free(request)
            request.num_computed_tokens = request.num_cached_blocks = 0
            scheduler.waiting.append(request)

    def reset(self) -> None:
        self.manager.reset()

    def write_version(self) -> None:
        text = f"version: RL-STEP{self.version:02}-x\n"
        (self.folder / "version.yaml").write_text(text, "utf-8")

    def end_some(self, count: int) -> None:
        """The finish thread writes and releases, later than the scheduler."""
        for request in [self.ends.pop(0) for _ in range(min(count, len(self.ends)))]:
            self.scheduler.finish_now(request)

    # -- requests and faults

    def add(self, number: int) -> None:
        rng, longest = self.rng, (self.blocks - 1) * self.size - self.drafts - 6
        longest = max(1, min(longest, 40))
        base = rng.choice(self.bases)
        prompt = [*base[: rng.randrange(1, len(base) + 1)], rng.randrange(3)][:longest]
        media = None
        if len(prompt) > 3 and rng.random() < 0.2:
            media = [(rng.randrange(2), 2, rng.choice(("cat", "dog")))]
        most = max(1, self.blocks * self.size - len(prompt) - self.drafts)
        request = Request(f"r{number}", prompt, media)
        self.scheduler.add(request, min(most, rng.randrange(1, 8)))
        self.started.append(request)
        if rng.random() < 0.3:
            self.bases.append(list(request.tokens))

    def fault(self) -> None:
        rng = self.rng
        Faults.mode = rng.choice(MODES) if rng.random() < 0.3 else "ok"
        set_sdk_fault(rng.choice(list(SDK_FAULTS)))
        for name in self.copies.fails:
            self.copies.fails[name] = rng.random() < 0.05
        self.copies.hangs = rng.random() < 0.02
        chance = rng.random()
        if chance < 0.02:
            self.restart()
        elif chance < 0.06:
            self.lose_memory(new_weights=chance < 0.04)
        elif chance < 0.15:
            self.scheduler.abort(rng.choice(self.started))

    def step(self) -> None:
        try:
            self.scheduler.step()
            self.end_some(self.rng.randrange(4))
        except DeviceError:
            self.restart()
            return
        if any(isinstance(error, DeviceError) for error in self.scheduler.failures):
            self.restart()

    def run(self, requests: int) -> None:
        """Serve requests to their ends."""
        rng = self.rng
        self.bases = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
        self.started: list[Request] = []
        self.write_version()
        self.open()
        try:
            for number in range(requests):
                self.add(number)
                for _ in range(rng.randrange(4)):
                    self.step()
                check(self.manager)
                self.fault()
            self._end()
        finally:
            self.close()

    def close(self) -> None:
        self.manager.close()

    def _end(self) -> None:
        Faults.mode = "ok"
        set_sdk_fault("ok")
        self.copies.fails = {"store": False, "load": False}
        self.copies.hangs = False
        for _ in range(STEPS):
            one = self.scheduler
            if not (one.waiting or one.running or one.prefilling or self.ends):
                break
            self.step()
        else:
            raise AssertionError(f"requests left: {self.scheduler.left()}")
        self.check_bytes()
        check(self.manager)
        until = time.monotonic() + LIMIT
        while not self.manager.can_allocate_gpu_blocks(self.blocks) and time.monotonic() < until:
            time.sleep(0.002)  # late calls of AttentionStore
        found = self.manager.statistics()
        available = found.free_gpu_blocks + found.evictable_gpu_blocks
        assert available == self.blocks, f"{self.blocks - available} blocks are lost"
        assert found.requests == 0, "requests hold blocks after their ends"

    def check_bytes(self) -> None:
        """No request has started from other bytes than the model's, and no match has failed for
        another reason than too few blocks."""
        one = self.scheduler
        assert one.wrong == [], f"wrong bytes: {one.wrong}"
        odd = [error for error in one.failures if not isinstance(error, NoRoom | DeviceError)]
        assert odd == [], f"matches have failed: {odd}"
        for _, _, metrics in one.hits:
            for tier in self.hits:
                self.hits[tier] += metrics[f"{tier}_match_token_num"]
        self.preemptions += one.preemptions


class V1Simulation(Simulation):
    """One run of the scheduler in v1 mode, with a worker for each rank. A copy that fails ends the
    engine, which restarts."""

    def _draw_sizes(self) -> None:
        super()._draw_sizes()
        self.backend = self.rng.choice((None, "mooncake")) if self.cpu else None
        policies = ("write_through", "write_through_selective", "write_back")
        self.policy, self.threshold = self.rng.choice(policies), self.rng.choice((1, 2, 3))

    def open(self) -> None:
        rng = self.rng
        config = make_config(
            self.blocks,
            self.cpu,
            backend=self.backend,
            drafts=self.draft_layers if self.drafts else None,
            model=str(self.folder),
            block_size=self.size,
            ranks=self.ranks,
            layers=self.layers - self.draft_layers,
            write_policy=self.policy,
            write_through_threshold=self.threshold,
        )
        self.memory = self.make_memory(
            self.blocks, self.size, ranks=self.ranks, layers=self.layers, roles=self.roles
        )
        self.memory.lose(self.version)
        options: dict[str, Any] = {}
        if self.backend:
            options["layout"] = {
                "kind": f"{ModelLayout.__module__}:{ModelLayout.__name__}",
                "num_layers": self.layers - self.draft_layers,
                "extra_layers": self.draft_layers,
                "options": {"stems": list(self.roles)},
            }
            options["storage"] = {"timeout_s": 5.0}
        given: dict[str, Any] = {"options": options, "environ": POOL if self.backend else {}}
        self.manager = CacheManager(config, **given)
        self.workers = []
        for rank in range(self.ranks):
            worker = CacheController(config, rank, rank, stream=self.stream, **given)
            backend = Attention(self.memory, rank)
            worker.initialize_kv_cache(backend, self.blocks)
            if self.draft_layers:
                first = self.layers - self.draft_layers
                worker.initialize_mtp_kv_cache(backend, self.blocks, self.draft_layers, first)
            self.workers.append(worker)
        self.scheduler = V1Scheduler(
            self.manager,
            self.memory,
            config,
            self.workers,
            chance=lambda share: rng.random() < share,
            patience=0.02,
            chunk=rng.choice((self.chunk, self.chunk + 1)),
            max_running=self.max_running,
            next_token=lambda _: rng.randrange(3),
            drafts=self.drafts,
            accepted=lambda _: rng.randrange(self.drafts + 1),
            reserve=self.reserve,
        )
        self.ends = []
        self.scheduler.finisher = self.ends.append

    def add(self, number: int) -> None:
        try:
            super().add(number)
        except DeviceError:  # of a copy that a prefetch comes after
            self.restart()

    def reset(self) -> None:
        assert self.manager.reset_cache()

    def close(self) -> None:
        self.manager.close()
        for worker in self.workers:
            worker.free_cache()


def simulate(
    rng: Any, requests: int = 15, kind: type[Simulation] = Simulation, **given: Any
) -> Simulation:
    """A run over drawn sizes, `given` ones apart.

    Raises:
        AssertionError: wrong bytes, lost blocks, a request that does not end.
    """
    SharedStore.pool.clear()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        one = kind(rng, folder, **given)
        for name in ("store", "load"):
            stack.enter_context(mock.patch.object(RankCopies, name, one.copies.around(name)))
        waits = one.copies.of_layers()
        stack.enter_context(mock.patch.object(LayerDoneCounter, "wait_for_layer", waits))
        stack.enter_context(mock.patch.object(factory, "make_backend", made_pool))
        stack.enter_context(mock.patch.object(device_cache, "MARGIN", 0.01))
        stand_in.reset()
        stack.callback(stand_in.reset)
        stack.callback(setattr, Faults, "mode", "ok")
        stack.callback(SharedStore.pool.clear)
        one.run(requests)
        return one


def main(first: int = 0, seeds: int = 100, requests: int = 30, *, v1: bool = False) -> None:
    """Run seeds, and name the first one that fails. v1: of `CacheManager` and its workers."""
    import random

    kind = V1Simulation if v1 else Simulation

    begun, totals = time.monotonic(), {"gpu": 0, "cpu": 0, "storage": 0}
    restarts = preemptions = 0
    for seed in range(first, first + seeds):
        try:
            found = simulate(random.Random(seed), requests, kind)
        except BaseException:
            print(f"seed {seed} fails", file=sys.stderr)
            raise
        for tier, tokens in found.hits.items():
            totals[tier] += tokens
        restarts += found.restarts
        preemptions += found.preemptions
    print(
        f"{seeds} seeds in {time.monotonic() - begun:.0f} s: 0 wrong bytes, 0 lost blocks, "
        f"hit tokens {totals}, {preemptions} preemptions, {restarts} restarts"
    )


if __name__ == "__main__":
    cyclopts.run(main)
