"""GpuSwapper and a data plane with invalid reports: every pair counts as failed, and the actor
keeps running."""

from __future__ import annotations

from functools import partial

import pytest

from kvactors.data_plane.base import Direction
from kvactors.gpu_swapper.actor import GpuSwapper
from kvactors.gpu_swapper.messages import Copy
from tests.support.effects import receiver
from tests.support.stepper import Stepper


class Plane:
    """A data plane with copies that the test answers."""

    device = None

    def on_status(self, changed):
        pass

    async def copy(self, *_arguments):
        raise AssertionError("the test answers for it")


@pytest.mark.parametrize(
    ("report", "failed"),
    [
        ((), ()),
        ([1], (1,)),
        ((2,), (0, 1)),
        ((-1,), (0, 1)),
        (None, (0, 1)),
        ("ab", (0, 1)),
        (7, (0, 1)),
        ({0}, (0,)),
        ((1, 1), (1,)),
    ],
)
async def test_the_reports_of_an_executor_are_checked(report, failed):
    evictor, index = receiver("cpu_evictor"), receiver("prefix_index")
    make = partial(GpuSwapper, plane=Plane(), evictor=evictor, index=index)
    with Stepper(make) as stepper:
        (job,) = stepper.turn(Copy(1, Direction.TO_HOST, (4, 5), (0, 1))).jobs
        (copied,) = stepper.finish(job, report).to(evictor)
        assert copied.failed == failed


async def test_a_copy_that_raises_has_failed_as_a_whole():
    evictor, index = receiver("cpu_evictor"), receiver("prefix_index")
    make = partial(GpuSwapper, plane=Plane(), evictor=evictor, index=index)
    with Stepper(make) as stepper:
        (job,) = stepper.turn(Copy(1, Direction.TO_HOST, (4, 5), (0, 1))).jobs
        (copied,) = stepper.fail(job, RuntimeError("no device")).to(evictor)
        assert copied.failed == (0, 1)
