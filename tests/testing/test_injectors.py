"""Faults by the vocabulary: each seam has one injector, and refuses faults of other seams."""

from __future__ import annotations

import pytest

from kvactors.testing.faults import Fault
from kvactors.testing.plan import carry_out
from tests.chaos.proxy import Proxy
from tests.support import attentionstore_sdk as stand_in
from tests.support.child import child
from tests.support.injectors import FaultyMaster, ProcessFaults
from tests.support.rank_process import RankProcess

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


@pytest.fixture
def service():
    stand_in.reset()
    yield stand_in.service("m")
    stand_in.reset()


SETTINGS = ("broken", "slow", "stuck", "capacity", "refuse_block", "counts", "leaks", "fail_after")


@pytest.mark.parametrize(
    ("fault", "changed"),
    [
        (Fault("store_down"), {"broken"}),
        (Fault("store_slow", delay=0.5), {"slow"}),
        (Fault("store_hang", delay=0.5), {"stuck"}),
        (Fault("store_small", amount=5), {"capacity"}),
        (Fault("store_refuse_block", amount=3), {"refuse_block"}),
        (Fault("store_count_low"), {"counts"}),
        (Fault("store_count_invalid"), {"counts"}),
        (Fault("store_leak"), {"leaks"}),
        (Fault("store_lose_answers"), {"fail_after"}),
    ],
    ids=lambda one: one.kind if isinstance(one, Fault) else "",
)
async def test_each_fault_of_an_sdk_begins_and_ends(service, fault, changed):
    sound = {name: vars(service)[name] for name in SETTINGS}
    await service.inject(fault)
    assert {name for name in SETTINGS if vars(service)[name] != sound[name]} == changed
    await service.recover(fault)
    assert {name: vars(service)[name] for name in SETTINGS} == sound


async def test_lost_objects_are_the_oldest_and_their_paths_stay_in_the_index(service):
    service.objects = {((n,), layer): b"" for n in range(3) for layer in range(2)}
    service.resident = {(n,) for n in range(3)}
    await carry_out(service, Fault("object_lost", amount=2))
    assert set(service.objects) == {((2,), 0), ((2,), 1)}
    assert len(service.resident) == 3


async def test_a_fault_of_another_seam_is_refused(service):
    async with child("-c", ECHO) as echo:
        for target in (
            ProcessFaults(echo),
            service,
            Proxy(1),
            FaultyMaster(),
            RankProcess.__new__(RankProcess),
        ):
            with pytest.raises(ValueError, match="clock_jump is no fault of"):
                await target.inject(Fault("clock_jump"))
