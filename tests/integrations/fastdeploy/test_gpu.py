"""Tensors of a GPU, on the stand-in driver."""

from __future__ import annotations

from kvactors.integrations.fastdeploy import PrefixCacheManager
from tests.integrations.fastdeploy.config import make_config
from tests.integrations.fastdeploy.conftest import RESERVE, Engine, memory_of_gpu
from tests.integrations.fastdeploy.test_scheduler import drive


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
