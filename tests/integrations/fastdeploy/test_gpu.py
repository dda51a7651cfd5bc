"""Tensors of a GPU, on the stand-in driver."""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
import pytest

from kvactors.data_plane.cuda import driver as cuda
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.integrations.fastdeploy import PrefixCacheManager
from tests.integrations.fastdeploy.config import BLOCK_SIZE, make_config
from tests.integrations.fastdeploy.conftest import RESERVE, Engine
from tests.integrations.fastdeploy.oracle import ModelMemory
from tests.integrations.fastdeploy.test_scheduler import drive
from tests.support.cuda import PointerTensor, opened_gpu


@pytest.fixture
def gpu(monkeypatch):
    with opened_gpu() as found:
        monkeypatch.setattr(cuda, "load_driver", lambda: CudaDriver(found.fake.path))
        yield found


def test_runs_over_tensors_of_a_gpu(gpu, tmp_path):
    def make(shape):
        tensor = PointerTensor(gpu.allocate(prod(shape)), shape, "uint8")
        ctypes.memset(tensor.address, 0, prod(shape))
        return tensor

    def view(tensor):
        content = (ctypes.c_uint8 * prod(tensor.shape)).from_address(tensor.address)
        return np.ctypeslib.as_array(content)

    config = make_config(6, 3, backend="file")
    memory = ModelMemory(6, BLOCK_SIZE, make=make, view=view)
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
