"""serve_rank cancelled at every step, by asyncio and by anyio, once and twice: nothing is left, and
the next one works with the same store."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import anyio
import pytest

from kvactors.data_plane.ranks.leader import RankGroup
from kvactors.data_plane.ranks.worker import serve_rank
from kvactors.device.host import HostDevice
from kvactors.identity import StoreIdentity
from kvactors.layout import make_layout
from kvactors.settings import (
    CacheConfig,
    Config,
    DeviceConfig,
    HostConfig,
    LayoutConfig,
    StorageConfig,
)
from kvactors.settings.ranks import RanksConfig

BLOCK, STEPS = 4, 60


def settings(tmp_path) -> Config:
    return Config(
        cache=CacheConfig(block_size=BLOCK, model="model-a"),
        device=DeviceConfig(num_blocks=4),
        host=HostConfig(slots=1024, transit_slots=8),
        layout=LayoutConfig(num_layers=2, num_kv_heads=1, head_dim=1024, dtype="uint8"),
        storage=StorageConfig(
            backend="file", directory=str(tmp_path / "store"), capacity_blocks=64
        ),
    )


EARLIER: set[threading.Thread] = set()


class Setting:
    """A leader of one rank at a unix socket, and calls of serve_rank for it."""

    def __init__(self, tmp_path) -> None:
        self.config = settings(tmp_path)
        self.layout = make_layout(self.config.layout, BLOCK)
        self.endpoint = f"unix://{tmp_path}/ranks"
        identity = StoreIdentity("model-a", "default", self.layout.fingerprint, 0, 1)
        self.group = RankGroup(
            RanksConfig(1, self.endpoint, 30.0, 60.0), identity, 4, 1032, storage="file"
        )
        self.admitted = asyncio.Event()

    def serving(self) -> asyncio.Task:
        device = HostDevice(self.layout, 4)
        work = serve_rank(
            self.endpoint, device, rank=0, ranks=1, config=self.config, admitted=self.admitted.set
        )
        return asyncio.ensure_future(work)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def threads_ended() -> None:
    """Threads that a test before this one has left hanging on purpose do not count."""
    with anyio.fail_after(60):
        while [
            one
            for one in threading.enumerate()
            if one.name.startswith("kvactors") and one not in EARLIER
        ]:
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _earlier_threads():
    EARLIER.update(threading.enumerate())
    yield
    EARLIER.clear()


async def nothing_left(before: set) -> None:
    await threads_ended()
    assert asyncio.all_tasks() - before == set()


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancelled_by_asyncio_at_every_step(tmp_path, times):
    setting = Setting(tmp_path)
    before = asyncio.all_tasks()
    for step in range(STEPS):
        task = setting.serving()
        for _ in range(step):
            await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])
        assert task.cancelled(), (step, task)
        assert not [
            one for one in asyncio.all_tasks() if one.get_name().startswith("kvactors rank")
        ]
        await nothing_left(before)
    await finally_admitted(setting)


async def test_cancelled_by_asyncio_while_it_serves(tmp_path):
    setting = Setting(tmp_path)
    before = asyncio.all_tasks()
    opening = asyncio.ensure_future(setting.group.open())
    for _ in range(10):
        task = setting.serving()
        with anyio.fail_after(60):
            await setting.admitted.wait()
        setting.admitted.clear()
        await opening
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    open_before = descriptors()
    await setting.group.close()
    await nothing_left(before)
    assert descriptors() < open_before
    assert not (tmp_path / "ranks").exists()


async def test_cancelled_by_anyio_at_every_step(tmp_path):
    setting = Setting(tmp_path)
    before = asyncio.all_tasks()
    for step in range(0, STEPS, 3):
        with anyio.CancelScope() as scope:

            async def later(steps=step, scope=scope) -> None:
                for _ in range(steps):
                    await asyncio.sleep(0)
                scope.cancel()

            cancelling = asyncio.ensure_future(later())
            await serve_rank(
                setting.endpoint,
                HostDevice(setting.layout, 4),
                rank=0,
                ranks=1,
                config=setting.config,
            )
        assert scope.cancelled_caught
        await cancelling
        await nothing_left(before)
    await finally_admitted(setting)


async def finally_admitted(setting: Setting) -> None:
    """One more call works with the same store and socket."""
    task = setting.serving()
    with anyio.fail_after(60):
        await setting.group.open()
    assert setting.group.healthy
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await setting.group.close()
    await threads_ended()
