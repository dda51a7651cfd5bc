"""DeviceStoreActor: transfers, refusals, and that nothing waits for a store that does not
return."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from kvactors.storage.device_store import WAITING, DeviceStore, DeviceStoreActor
from kvactors.storage.messages import (
    DeviceFetched,
    DeviceSaved,
    FetchDevice,
    SaveDevice,
    TransferDone,
)
from tests.data_plane.planes import StubPlane
from tests.support.effects import receiver
from tests.support.stepper import Stepper

TOKENS = bytes(4 * 4 * 4)


class Recorder(DeviceStore):
    """Moves every block and records the requests."""

    def __init__(self) -> None:
        super().__init__(64)
        self.moves: list[tuple[str, int]] = []

    async def open(self) -> None:
        """Nothing."""

    async def fetch(self, tokens, start, blocks, seconds) -> int:
        self.moves.append(("fetch", start))
        return len(blocks)

    async def save(self, tokens, start, blocks, seconds) -> int:
        self.moves.append(("save", start))
        return len(blocks)

    async def close(self) -> None:
        """Nothing."""


def stepped(backend: Recorder, plane: StubPlane | None = None) -> Stepper[DeviceStoreActor]:
    plane = StubPlane(device_store=backend) if plane is None else plane
    make = partial(DeviceStoreActor, backend=backend, plane=plane, evictor=receiver("cpu_evictor"))
    return Stepper(make)


def fetch(op: int, deadline: float = 1e12, memory_generation: int = 0) -> FetchDevice:
    return FetchDevice(op, TOKENS, op, (0, 1), deadline, memory_generation)


def save(op: int, deadline: float = 1e12, memory_generation: int = 0) -> SaveDevice:
    return SaveDevice(op, TOKENS, op, (0, 1), deadline, memory_generation)


def carried_out(job) -> TransferDone:
    """Run a job's coroutine to its end in a new loop."""
    return asyncio.run(job.coroutine)


def answers(effects):
    return [(type(one).__name__, one.op, one.num_blocks) for one in effects.to("cpu_evictor")]


@pytest.mark.parametrize(("make", "kind"), [(fetch, "DeviceFetched"), (save, "DeviceSaved")])
def test_a_move_of_memory_that_was_lost_since_is_not_made(make, kind):
    backend = Recorder()
    plane = StubPlane(device_store=backend)
    with stepped(backend, plane) as direct:
        running = direct.turn(make(1)).jobs[0]
        direct.turn(make(2))  # it waits while a rank's process is replaced
        plane.generation = 1
        waiting = direct.finish(running, carried_out(running)).jobs[0]
        assert answers(direct.finish(waiting, carried_out(waiting))) == [(kind, 2, 0)]
        later = direct.turn(make(3, memory_generation=1)).jobs[0]
        assert answers(direct.finish(later, carried_out(later))) == [(kind, 3, 2)]
    assert [start for _, start in backend.moves] in ([1, 3], [3])


def test_nothing_waits_for_a_move_that_takes_longer_than_it_may():
    with stepped(Recorder()) as direct:
        now = direct.now
        running = direct.turn(save(1, now + 1.0)).jobs[0]
        assert answers(direct.turn(fetch(2, now + 60.0))) == []
        assert answers(direct.turn(save(3, now + 60.0))) == []
        assert answers(direct.elapse(0.9)) == []
        assert answers(direct.elapse(0.2)) == [("DeviceFetched", 2, 0), ("DeviceSaved", 3, 0)]
        assert answers(direct.turn(fetch(4, now + 60.0))) == [("DeviceFetched", 4, 0)], (
            "nor does what comes later"
        )
        assert answers(direct.turn(save(5, now + 60.0))) == [("DeviceSaved", 5, 0)]
        over = direct.finish(running, TransferDone(DeviceSaved(1, 2)))
        assert answers(over) == [("DeviceSaved", 1, 2)], "its own blocks are held until it is over"
        again = direct.turn(fetch(6, now + 60.0)).jobs[0]
        assert answers(direct.elapse(5.0)) == [], (
            "the time of the last one does not count for this one"
        )
        assert answers(direct.finish(again, TransferDone(DeviceFetched(6, 2)))) == [
            ("DeviceFetched", 6, 2)
        ]


def test_the_oldest_of_too_many_saves_is_shed():
    with stepped(Recorder()) as direct:
        direct.turn(save(0))
        shed = [answers(direct.turn(save(op))) for op in range(1, WAITING + 3)]
        assert [one for one in shed if one] == [[("DeviceSaved", 1, 0)], [("DeviceSaved", 2, 0)]]
