"""kvactors' worker in vLLM, over stand-ins for vLLM's modules and for CUDA's driver."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvactors import DeviceError
from kvactors.data_plane.cuda import driver as cuda_driver
from tests.integrations.test_vllm import ROW, Config
from tests.integrations.vllm_stand_in import Platform, stand_in
from tests.support.cuda import Gpu, PointerTensor, opened_gpu

LIMIT = 60.0
OUT_OF_MEMORY = 2
PAGE = ROW // 2
BLOCKS, CHUNK = 8, 2
"""Blocks of the device, and of a chunk."""


class Engine:
    """The spec in one process, with the tensors of two layers.

    Args:
        modules: the adapter's.
        tensors: of the layers.
        extra: settings of kvactors.
    """

    def __init__(self, modules: Any, tensors: list[Any], **extra: Any) -> None:
        settings = {"cpu_bytes_to_use": 4 * CHUNK * ROW, "storage": {"backend": "none"}, **extra}
        config = Config(blocks_per_chunk=CHUNK, worker_kv_bytes_per_block=ROW, rank=0)
        config.extra_config, config.engine_id = settings, "one"
        self.spec = modules("spec").KVActorsOffloadingSpec(config)
        self.manager = self.spec.get_manager()
        self.caches = SimpleNamespace(tensors=[SimpleNamespace(tensor=one) for one in tensors])

    def worker(self) -> Any:
        return self.spec.get_worker(self.caches)

    def chunk(self, number: int) -> bytes:
        return bytes(self.manager.tiers.memory.view(number))

    def close(self, worker: Any) -> None:
        worker.shutdown()
        self.manager.shutdown()


def device_blocks(*numbers: int, first: int = 0, groups: Any = None) -> Any:
    """vLLM's `GPULoadStoreSpec`. groups: number of blocks and first one of each group."""
    sizes, indices = zip(*(groups or [(len(numbers), first)]), strict=True)
    return SimpleNamespace(block_ids=np.array(numbers), group_sizes=sizes, block_indices=indices)


def chunks(*numbers: int) -> Any:
    """vLLM's `CPULoadStoreSpec`."""
    return SimpleNamespace(block_ids=np.array(numbers))


def ended(worker: Any, *jobs: int) -> list[tuple[Any, ...]]:
    worker.wait(set(jobs))
    return [tuple(one)[:3] for one in worker.get_finished()]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with opened_gpu() as found:
        monkeypatch.setattr(cuda_driver, "load_driver", lambda: found.driver)
        yield found


def on(gpu: Gpu, folder: Path) -> AbstractContextManager[Any]:
    return stand_in(folder, Platform("cuda", gpu.stream))


def content(tensors: list[Any], number: int) -> bytes:
    return b"".join(ctypes.string_at(one.address + number * PAGE, PAGE) for one in tensors)


def test_chunks_go_to_the_host_and_back_behind_the_models_stream(gpu: Gpu, tmp_path: Path) -> None:
    tensors = gpu.tensors(BLOCKS, PAGE, PAGE, kind=PointerTensor)
    with on(gpu, tmp_path) as modules:
        engine = Engine(modules, tensors, copy_worker="kvactors")
        worker = engine.worker()
        computed = threading.Event()

        def compute() -> None:
            computed.wait(LIMIT)
            ctypes.memset(tensors[0].address, 7, PAGE)

        gpu.work(gpu.stream, compute)
        assert worker.submit_store(1, device_blocks(0, 5, 2), chunks(3, 1))
        worker.submit_store(2, device_blocks(4, first=1), chunks(0))
        time.sleep(0.1)  # time for a copy that ignores the stream
        early, before = worker.get_finished(), engine.chunk(3)
        computed.set()  # before a check may fail: the stream uses the tensors
        assert (early, before) == ([], bytes(CHUNK * ROW)), (
            "copied before the model had computed it"
        )
        assert ended(worker, 1, 2) == [(1, True, 3 * ROW), (2, True, ROW)]
        assert engine.chunk(3) == content(tensors, 0) + content(tensors, 5)
        assert engine.chunk(3)[:PAGE] == b"\x07" * PAGE
        assert engine.chunk(1) == content(tensors, 2) + bytes(ROW)
        assert engine.chunk(0) == bytes(ROW) + content(tensors, 4)

        with pytest.raises(DeviceError, match="are not 1 chunks"):
            worker.submit_load(3, chunks(3), device_blocks(0, 1, 2))
        worker.submit_load(3, chunks(3, 1), device_blocks(6, 7, first=1))
        assert ended(worker, 3) == [(3, True, 2 * ROW)]
        assert content(tensors, 6) == content(tensors, 5)
        assert content(tensors, 7) == content(tensors, 2)

        # blocks of three groups, the second of which has none
        groups = [(1, 1), (0, 0), (2, 4)]
        worker.submit_store(4, device_blocks(0, 4, 5, groups=groups), chunks(2, 1))
        assert ended(worker, 4) == [(4, True, 3 * ROW)]
        assert engine.chunk(2) == bytes(ROW) + content(tensors, 0)
        assert engine.chunk(1) == content(tensors, 4) + content(tensors, 5)
        with pytest.raises(DeviceError, match="are not 1 chunks"):
            worker.submit_load(5, chunks(2), device_blocks(0, 4, groups=[(1, 1), (1, 0)]))
        engine.close(worker)
    assert list(tmp_path.iterdir()) == []


def test_the_order_of_a_chunks_bytes_is_part_of_its_identity(gpu: Gpu, tmp_path: Path) -> None:
    """vLLM's worker puts the blocks of one layer side by side, kvactors' the layers of a block."""
    found = []
    with on(gpu, tmp_path) as modules:
        for name in ("vllm", "kvactors"):
            engine = Engine(modules, [], copy_worker=name)
            found.append(engine.manager.tiers.config.identity["copied_by"])
            engine.manager.shutdown()
    assert found == ["vllm", "kvactors"]


def test_a_copy_of_the_gpu_that_fails_is_named_and_is_no_success(gpu: Gpu, tmp_path: Path) -> None:
    """vLLM has no result for it, and would compute with other bytes."""
    with on(gpu, tmp_path) as modules:
        engine = Engine(modules, gpu.tensors(BLOCKS, PAGE, PAGE), copy_worker="kvactors")
        worker = engine.worker()
        gpu.fake.fail("cuEventRecord", OUT_OF_MEMORY, 2)
        worker.submit_store(1, device_blocks(0, 1), chunks(0))
        worker.wait({1})
        with pytest.raises(DeviceError, match="a copy from the GPU failed: cuEventRecord"):
            worker.get_finished()
        engine.close(worker)
