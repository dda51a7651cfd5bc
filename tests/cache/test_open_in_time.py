"""`open` ends in `actors.open_timeout_s` seconds a part even if foreign code hangs, with an error that names
the part, and leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest
import structlog

import kvactors
from kvactors.actor.clock import now
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.memory import MemoryBackend
from kvactors.testing.loop import simulate
from tests.support.cache import BLOCK, settings

START, DRAIN = 3.0, 2.0
STORE = {"backend": "memory", "write_policy": "write_through"}


class Late:
    """A call that does not return. how: whether it ends when it is cancelled."""

    def __init__(self, how):
        self.how = how
        self.calls = self.cancelled = self.closed = 0
        self.release = asyncio.Event()

    async def __call__(self, *_arguments):
        self.calls += 1
        if self.how == "cancels itself":
            raise asyncio.CancelledError
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                if self.how == "ends when cancelled":
                    raise

    async def close(self):
        self.closed += 1


class Direct(DeviceStore):
    open = None

    async def fetch(self, tokens, start, blocks, seconds):
        return 0

    async def save(self, tokens, start, blocks, seconds):
        return 0

    async def close(self):
        pass


def opened(part, late, monkeypatch):
    """A cache of which one part opens late."""
    if part == "copy engine":
        monkeypatch.setattr("kvactors.data_plane.engine.InlineCopies.open", late, raising=False)
    if part == "device store":
        direct = Direct(1)
        direct.open = late
        monkeypatch.setattr("kvactors.data_plane.local.make_device_store", lambda *_: direct)
    store = MemoryBackend(b"f" * 32, 2 * BLOCK * 16)
    sink = MemorySink(MemorySinkConfig(name="late"), BLOCK)
    where, call = {
        "store": (store, "open"),
        "attach": (store, "attach"),
        "sink": (sink, "open"),
    }.get(part, (None, ""))
    if where is not None:
        setattr(where, call, late)
        where.close = late.close
    config = settings(
        host={"slots": 8, "transit_slots": 8},
        storage=STORE,
        sinks=(),
        actors={"open_timeout_s": START, "drain_timeout_s": DRAIN},
    )
    return kvactors.open(config, backend=store, sinks=[sink], inline_copies=True)


NAMES = {
    "store": (kvactors.StoreError, "store "),
    "attach": (kvactors.StoreError, "store "),
    "sink": (kvactors.SinkError, "sink 'late' "),
    "copy engine": (kvactors.DeviceError, "copy engine "),
    "device store": (kvactors.StoreError, "device store "),
}


@pytest.mark.parametrize("how", ["ends when cancelled", "ignores its cancellation"])
@pytest.mark.parametrize("part", NAMES)
def test_a_part_that_does_not_open_is_a_named_error_in_time(part, how, monkeypatch):
    async def main():
        late, before = Late(how), asyncio.all_tasks()
        began = now()
        kind, name = NAMES[part]
        with pytest.raises(kind, match=f"^{name}did not open in 3 s \\(actors.open_timeout_s\\)"):
            async with opened(part, late, monkeypatch):
                raise AssertionError("opened")
        assert now() - began < START + DRAIN + 2.0
        assert late.calls == 1
        assert late.cancelled
        assert late.closed == (part in ("store", "attach", "sink"))
        late.release.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() - before == set()

    with structlog.testing.capture_logs() as logs:
        simulate(main)
    left = [one for one in logs if one["event"] == "opening did not end in time"]
    assert bool(left) == (how == "ignores its cancellation")


@pytest.mark.parametrize("part", ["store", "attach", "sink"])
def test_a_cancelled_open_ends_in_time_although_a_part_ignores_its_cancellation(part, monkeypatch):
    async def main():
        late = Late("ignores its cancellation")

        async def entered():
            async with opened(part, late, monkeypatch):
                raise AssertionError("opened")

        task = asyncio.ensure_future(entered())
        while not late.calls:
            await asyncio.sleep(0)
        began = now()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert now() - began < DRAIN + 2.0
        assert late.closed == 1
        late.release.set()

    with structlog.testing.capture_logs() as logs:
        simulate(main)
    assert any("stays mapped" in one["event"] for one in logs)


@pytest.mark.parametrize("part", ["copy engine", "device store"])
def test_a_part_that_cancels_itself_is_an_error_and_no_cancellation(part, monkeypatch):
    async def main():
        late = Late("cancels itself")
        with pytest.raises(NAMES[part][0], match="raised CancelledError"):
            async with opened(part, late, monkeypatch):
                raise AssertionError("opened")

    simulate(main)
