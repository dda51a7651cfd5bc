"""Settings of copies that have no use with a device are refused, and leave no memory behind."""

from __future__ import annotations

from typing import Any

import pytest

import kvactors
from kvactors.data_plane.cuda import device as cuda
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.errors import ConfigError
from kvactors.layout.gqa import GQALayout
from tests.support.cuda import opened_gpu

LAYOUT = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "dtype": "bfloat16"}
FOR_CUDA = {"dma_min_bytes": 4096}


def config_of(kind: str = "host", **host: Any) -> kvactors.Config:
    return kvactors.Config.from_mapping(
        {
            "cache": {"block_size": 16},
            "device": {"num_blocks": 6, "kind": kind},
            "host": {"slots": 4, **host},
            "layout": LAYOUT,
        }
    )


async def opened(config: kvactors.Config, **options: Any) -> None:
    """Open a cache and close it."""
    async with kvactors.open(config, **options):
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    with opened_gpu() as found:
        monkeypatch.setattr(cuda, "load_driver", lambda: CudaDriver(found.fake.path))
        yield found


@pytest.mark.parametrize("name", FOR_CUDA)
async def test_settings_of_a_gpus_copies_have_no_use_in_host_memory(name: str) -> None:
    text = f"host.{name} has no use without a CUDA device"
    with pytest.raises(ConfigError, match=text):
        await opened(config_of(**{name: FOR_CUDA[name]}))


async def test_copying_threads_have_no_use_with_a_gpu_and_its_memory_is_free_again(
    gpu: Any,
) -> None:
    before = gpu.fake.live("device")
    with pytest.raises(ConfigError, match=r"host\.copy_threads has no use with a CUDA device"):
        await opened(config_of("cuda", copy_threads=2))
    assert gpu.fake.live("device") == before


async def test_a_device_that_is_passed_counts_and_not_the_configs(gpu: Any) -> None:
    layout = GQALayout(2, 2, 32, 16, "bfloat16")
    device = CudaDevice.allocate(layout, 6, driver=CudaDriver(gpu.fake.path))
    async with kvactors.open(config_of(**FOR_CUDA), device=device) as cache:
        assert cache.check() == []
    with pytest.raises(ConfigError, match=r"host\.copy_threads has no use with a CUDA device"):
        await opened(config_of(copy_threads=2), device=device)
    device.close()  # it is the caller's
