"""A data plane refuses every kind of work that names memory of another generation."""

from __future__ import annotations

import pytest

from kvactors.data_plane.base import Direction
from kvactors.storage.backend import ReadReport, WriteReport
from kvactors.storage.device_store import DeviceStore
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from tests.data_plane.planes import StubPlane

KEYS = [bytes([1]) * 32, bytes([2]) * 32]


class Store(MemoryBackend):
    """A store that records its requests and carries them out."""

    def __init__(self, done: list[str]) -> None:
        super().__init__(bytes(32), 64)
        self.done = done

    async def read(self, keys, views, expired):
        self.done.append("read")
        return ReadReport(bytes([Outcome.OK]) * len(keys), [])

    async def write(self, keys, views, expired, lineages=(), salts=()):
        self.done.append("write")
        return WriteReport(bytes([Outcome.OK]) * len(keys), [])


class DeviceMemory(DeviceStore):
    """A store of device memory that records its requests and carries them out."""

    def __init__(self, done: list[str]) -> None:
        super().__init__(64)
        self.done = done

    async def open(self):
        pass

    async def close(self):
        pass

    async def fetch(self, tokens, start, blocks, seconds):
        self.done.append("fetch")
        return len(blocks)

    async def save(self, tokens, start, blocks, seconds):
        self.done.append("save")
        return len(blocks)


class Plane(StubPlane):
    """A plane whose memory was lost twice."""

    generation = 2

    def __init__(self) -> None:
        self.done: list[str] = []
        super().__init__(Store(self.done), DeviceMemory(self.done))

    async def copy_pairs(self, direction, blocks, slots, progress=None):
        self.done.append("copy")
        return ()


def never() -> bool:
    return False


WORK = {
    "copy to the host": (
        "copy",
        lambda plane, generation: plane.copy(generation, Direction.TO_HOST, [1, 2], [3, 0]),
        (),
        (0, 1),
    ),
    "copy to the device": (
        "copy",
        lambda plane, generation: plane.copy(generation, Direction.TO_DEVICE, [1, 2], [3, 0]),
        (),
        (0, 1),
    ),
    "read": (
        "read",
        lambda plane, generation: plane.read(generation, KEYS, [0, 1], never),
        ReadReport(bytes([Outcome.OK]) * 2, []),
        ReadReport(bytes([Outcome.UNAVAILABLE]) * 2, []),
    ),
    "write": (
        "write",
        lambda plane, generation: plane.write(generation, KEYS, [0, 1], never),
        WriteReport(bytes([Outcome.OK]) * 2, []),
        WriteReport(bytes([Outcome.UNAVAILABLE]) * 2, []),
    ),
    "fetch": (
        "fetch",
        lambda plane, generation: plane.fetch(generation, b"", 0, (1, 2), 1.0),
        2,
        0,
    ),
    "save": ("save", lambda plane, generation: plane.save(generation, b"", 0, (1, 2), 1.0), 2, 0),
}


@pytest.mark.parametrize("generation", [0, 1, 3])
@pytest.mark.parametrize("work", WORK)
async def test_work_of_another_generation_is_refused(work, generation):
    plane = Plane()
    _, run, _, refused = WORK[work]
    assert await run(plane, generation) == refused
    assert plane.done == []


@pytest.mark.parametrize("work", WORK)
async def test_work_of_this_generation_is_carried_out(work):
    plane = Plane()
    name, run, done, _ = WORK[work]
    assert await run(plane, 2) == done
    assert plane.done == [name]
