"""Managers that a test makes, closed at its end."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest

from kvactors.data_plane.cuda import driver as cuda
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.integrations.fastdeploy import PrefixCacheManager
from kvactors.storage import factory
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request, make_config
from tests.integrations.fastdeploy.oracle import ModelMemory, seeds_of
from tests.integrations.fastdeploy.scheduler import Scheduler
from tests.support import attentionstore_sdk as stand_in
from tests.support.cuda import PointerTensor, opened_gpu
from tests.tier_cache.faulty_stores import Faults, FaultyMemory
from tests.tier_cache.stores import SharedStore


class Engine:
    """A manager, its tensors, and the requests of a test."""

    def __init__(self, manager: PrefixCacheManager, memory: ModelMemory, config: Any) -> None:
        self.manager, self.memory, self.config = manager, memory, config

    def scheduler(self, **settings: Any) -> Scheduler:
        return Scheduler(self.manager, self.memory, self.config, **settings)

    def match(self, request: Request) -> tuple[list[int], int, dict[str, Any]]:
        """Match a request as the scheduler does."""
        found = self.manager.request_match_blocks(request, BLOCK_SIZE)
        request.block_tables = list(found[0])
        return found

    def prefill(self, request: Request) -> dict[str, Any]:
        """Match and compute a whole prompt."""
        _, tokens, metrics = self.match(request)
        total = len(request.tokens)
        blocks = -(-total // BLOCK_SIZE) - len(request.block_tables)
        assert self.manager.can_allocate_gpu_blocks(blocks)
        request.block_tables += self.manager.allocate_gpu_blocks(blocks, request.request_id)
        self.memory.compute(seeds_of(request), request.block_tables, tokens, total)
        self.manager.update_cache_blocks(request, BLOCK_SIZE, total)
        return metrics

    def free(self, request: Request) -> None:
        """Give back what a request holds, as the scheduler does."""
        self.manager.release_block_ids(request)
        own = request.block_tables[request.num_cached_blocks :]
        self.manager.recycle_gpu_blocks(own, request.request_id)
        request.block_tables = []

    def serve(self, name: str, prompt: Any, media: Any = None) -> dict[str, Any]:
        """A whole request without output."""
        request = Request(name, prompt, media)
        metrics = self.prefill(request)
        self.manager.write_cache_to_storage(request)
        self.free(request)
        return metrics

    def wrong(self, request: Request, tokens: int) -> list[int]:
        """Tokens of a request whose bytes are not the model's."""
        return self.memory.wrong(seeds_of(request), request.block_tables, tokens)

    @property
    def free_blocks(self) -> list[int]:
        return sorted(self.manager.gpu_free_block_list)

    @property
    def available(self) -> int:
        found = self.manager.statistics()
        return found.free_gpu_blocks + found.evictable_gpu_blocks


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for a GPU, which managers find as the system's."""
    with opened_gpu() as found:
        monkeypatch.setattr(cuda, "load_driver", lambda: CudaDriver(found.fake.path))
        yield found


def memory_of_gpu(gpu: Any) -> Callable[..., ModelMemory]:
    """Makes tensors in the memory of a GPU, cleared. The arguments are those of `ModelMemory`."""

    def make(shape: tuple[int, ...]) -> PointerTensor:
        tensor = PointerTensor(gpu.allocate(prod(shape)), shape, "uint8")
        ctypes.memset(tensor.address, 0, prod(shape))
        return tensor

    def view(tensor: PointerTensor) -> Any:
        content = (ctypes.c_uint8 * prod(tensor.shape)).from_address(tensor.address)
        return np.ctypeslib.as_array(content)

    return partial(ModelMemory, make=make, view=view)


def made(store: type) -> Any:
    """In the place of `make_backend`."""
    return lambda config, model, digest, size: store(config, digest, size)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SharedStore]]:
    """A pool in this process, in the place of the file store."""
    monkeypatch.setattr(factory, "make_backend", made(SharedStore))
    SharedStore.pool.clear()
    yield SharedStore
    SharedStore.pool.clear()
    SharedStore.mode = "ok"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faults]]:
    """A store whose faults a test switches, in the place of the file store."""
    monkeypatch.setattr(factory, "make_backend", made(FaultyMemory))
    yield Faults
    Faults.mode = "ok"


@pytest.fixture
def service() -> Iterator[None]:
    """AttentionStore's stand-in, without objects and faults."""
    stand_in.reset()
    yield
    stand_in.reset()


@pytest.fixture
def engine(tmp_path: Any) -> Iterator[Any]:
    """Makes engines: gpu and cpu blocks, and keywords of `make_config`. `attach`: whether the
    tensors are. `file`: whether storage is a file store."""
    made: list[Engine] = []

    def make(
        gpu: int = 8,
        cpu: int = 0,
        *,
        ranks: int = 1,
        layers: int = 2,
        roles: Any = ("key_caches", "value_caches"),
        attach: bool = True,
        file: bool = False,
        environ: Any = None,
        memory: Any = None,
        gauges: Any = None,
        options: Any = None,
        **settings: Any,
    ) -> Engine:
        if file:
            settings["backend"] = "file"
        config = make_config(gpu, cpu, **settings)
        tensors = memory or ModelMemory(gpu, BLOCK_SIZE, ranks=ranks, layers=layers, roles=roles)
        variables = {"FILE_BACKEND_STORAGE_DIR": str(tmp_path / "kv")}
        manager = PrefixCacheManager(
            config,
            ranks,
            tensors=tensors.tensors,
            environ=variables | (environ or {}),
            options=options,
            gauges=gauges,
        )
        made.append(Engine(manager, tensors, config))
        if attach:
            manager.attach()
        return made[-1]

    yield make
    for one in made:
        one.manager.close()
