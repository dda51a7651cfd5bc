"""Errors that are no `Exception`, out of turns, jobs and threads: a failure like any other, never
an answer that does not come."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import ClassVar

import pytest

from kvactors.actor import (
    Actor,
    ActorSpec,
    Ask,
    Control,
    Group,
    InFlight,
    Message,
    RestartBudget,
    Supervisor,
    on,
)
from kvactors.actor.uncancelled import uncancelled
from kvactors.errors import ActorFailed, LeakedError
from kvactors.threads import in_thread
from tests.support.deadline import deadline_after


class Panic(BaseException):
    """As pyo3's PanicException: not an Exception."""


LEAKED = [
    asyncio.CancelledError("leaked"),
    Panic("leaked"),
    GeneratorExit("leaked"),
    StopIteration("leaked"),
]


class Fail(Ask[int], frozen=True, eq=False):
    error: BaseException


class Work(Message, frozen=True, eq=False):
    error: BaseException


class Unanswerable(Message, frozen=True, eq=False):
    pass


class Done(Control, frozen=True, eq=False):
    value: object


class Fragile(Actor):
    ROLE = "fragile"
    SENDS: ClassVar = {}

    def __init__(self, ref):
        super().__init__(ref)
        self.results = []

    @on(Fail)
    def fail(self, message, envelope):
        if message.error is None:
            self.answer(envelope, 7)
        else:
            raise message.error

    @on(Work)
    def work(self, message):
        async def job():
            await asyncio.sleep(0)
            raise message.error

        self.start_job(job(), Done, Done)

    @on(Unanswerable)
    def unanswerable(self, message):
        def broken(_result):
            raise ValueError("no completion")

        self.start_job(asyncio.sleep(0), broken, broken)

    @on(Done)
    def done(self, message):
        self.results.append(message.value)


class Wired:
    def __init__(self):
        self.in_flight = InFlight()
        self.supervisor = Supervisor(self.in_flight, RestartBudget(100))
        self.ref = self.supervisor.make_ref(Fragile, 8)

    def running(self):
        return self.supervisor.running(Group("a", (ActorSpec(Fragile, Fragile, self.ref),)))

    @property
    def actor(self):
        return self.supervisor.actor("fragile")


@pytest.mark.parametrize("way", ["direct", "queued"])
@pytest.mark.parametrize("error", LEAKED, ids=lambda error: type(error).__name__)
async def test_a_turn_that_raises_it_fails_its_actor_at_once(error, way, request):
    if way == "queued":
        request.getfixturevalue("queued")
    wired = Wired()
    async with wired.running():
        with pytest.raises(ActorFailed, match="leaked"):
            await wired.ref.ask(Fail(error), deadline=deadline_after(60))
        await wired.in_flight.wait_idle()
        assert await wired.ref.ask(Fail(None), deadline=deadline_after(60)) == 7
        assert wired.supervisor.statistics().failures == 1


@pytest.mark.parametrize("error", LEAKED, ids=lambda error: type(error).__name__)
async def test_a_job_that_raises_it_is_a_job_that_failed(error):
    wired = Wired()
    async with wired.running():
        await wired.ref.tell(Work(error))
        await wired.in_flight.wait_idle()
        (result,) = wired.actor.results
        assert isinstance(result, Exception)
        assert "leaked" in f"{result} {result.__cause__}"
        assert wired.supervisor.statistics().failures == 0


async def test_a_job_whose_completion_cannot_be_built_fails_its_actor():
    wired = Wired()
    async with wired.running():
        await wired.ref.tell(Unanswerable())
        await wired.in_flight.wait_idle()
        assert wired.supervisor.statistics().last_failure == "fragile: ValueError: no completion"


async def test_timers_end_with_their_actor():
    wired = Wired()
    async with wired.running():
        kept, cancelled = Done(1), Done(2)
        actor = weakref.ref(wired.actor)
        wired.actor.after(3600, kept)
        wired.actor.after(3600, cancelled).cancel()
    del wired
    await asyncio.sleep(0)
    gc.collect()
    assert actor() is None


@pytest.mark.parametrize("error", LEAKED, ids=lambda error: type(error).__name__)
async def test_a_thread_that_raises_it_completes_its_future(error):
    def call():
        raise error

    with pytest.raises(LeakedError, match="leaked"):
        await in_thread(call, "kvactors-test")


async def test_uncancelled_work_ends_and_the_cancellation_is_raised_then():
    steps = []

    async def work():
        for i in range(5):
            await asyncio.sleep(0)
            steps.append(i)

    task = asyncio.create_task(uncancelled(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == list(range(5))
