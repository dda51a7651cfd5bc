"""The time that all actors together take in a pass of the event loop."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from kvactors.actor import loop as actor_loop
from kvactors.actor import on
from kvactors.testing.loop import SimLoop
from tests.actor.test_actor import Note, Ping, Server, Wired


@pytest.fixture(autouse=True)
def no_inline_turns(monkeypatch):
    monkeypatch.setattr(actor_loop, "are_possible", lambda _: False)


@pytest.fixture
def no_time(monkeypatch):
    """Each pass has one turn, and those of actors that have stepped aside."""
    monkeypatch.setattr(actor_loop, "PASS_TIME_S", -1.0)


class Passes:
    """A loop whose passes and time are the test's."""

    def __init__(self):
        self.now, self.ready = 5.0, []

    def time(self):
        return self.now

    def call_soon(self, callback):
        self.ready.append(callback)

    def next_pass(self):
        ready, self.ready = self.ready, []
        for callback in ready:
            callback()


def test_the_time_of_a_pass_begins_with_its_first_turn():
    loop = Passes()
    time = actor_loop.PassTime()
    for _ in range(3):
        assert not time.is_over(loop)
        loop.now += actor_loop.PASS_TIME_S / 2
        assert not time.is_over(loop)
        loop.now += actor_loop.PASS_TIME_S
        assert time.is_over(loop)
        assert time.is_over(loop)
        assert len(loop.ready) == 1, "one callback a pass"
        loop.next_pass()
        loop.now += 1.0


class Timed(Server):
    """Notes its turns. A timer that is due at once is started in each."""

    SENDS: ClassVar = {}

    def __init__(self, ref, log):
        super().__init__(ref, None)
        self.log = log

    @on(Note)
    def note(self, message):
        self.log.append((self.ref.name, message.value))
        asyncio.get_running_loop().call_later(0, self.log.append, "timer")

    @on(Ping)
    def ping(self, message, envelope):
        self.log.append((self.ref.name, message.value))
        self.answer(envelope, message.value)


class Pair(Wired):
    """Two actors without channels between them."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.other = self.supervisor.make_ref(Timed, 4, name="other")
        [group, _] = self.members
        [spec] = group.members
        self.members = tuple(
            group._replace(
                name=ref.name,
                members=(
                    spec._replace(kind=Timed, factory=lambda ref: Timed(ref, self.log), ref=ref),
                ),
            )
            for ref in (self.server, self.other)
        )


@pytest.mark.usefixtures("no_time")
async def test_a_timer_that_is_due_runs_before_the_turn_of_an_actor_that_has_stepped_aside():
    pair = Pair()
    async with pair.running():
        await asyncio.sleep(0.01)
        assert pair.server.try_tell(Note(1))
        assert pair.other.try_tell(Note(2))
        await pair.in_flight.wait_idle()
        first, second, third = pair.log[:3]
        assert {first[0], third[0]} == {"server", "other"}
        assert second == "timer"


async def test_caches_on_one_loop_share_its_passes_and_a_loop_of_virtual_time_has_none():
    loop = asyncio.get_running_loop()
    assert actor_loop.pass_time_of(loop) is actor_loop.pass_time_of(loop) is not None
    sim = SimLoop(1)
    try:
        assert actor_loop.pass_time_of(sim) is None
    finally:
        sim.close()
