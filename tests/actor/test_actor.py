"""Actors and their supervisor: asks, back-pressure, jobs, failures, restarts, drain."""

from __future__ import annotations

import asyncio
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
    PeerRestarted,
    RestartBudget,
    Supervisor,
    on,
)
from kvactors.actor.clock import now
from kvactors.errors import ActorFailed, CacheFailed, DeadlineExceeded, WiringError
from tests.support.deadline import deadline_after
from tests.support.effects import receiver


class Ping(Ask[int], frozen=True, eq=False):
    value: int


class Boom(Ask[int], frozen=True, eq=False):
    pass


class Park(Ask[int], frozen=True, eq=False):
    pass


class Note(Message, frozen=True, eq=False):
    value: int


class Slow(Message, frozen=True, eq=False):
    seconds: float


class Worked(Control, frozen=True, eq=False):
    value: object


class Sink(Actor):
    ROLE = "sink"

    def __init__(self, ref):
        super().__init__(ref)
        self.notes, self.restarts = [], []

    @on(Note)
    def note(self, message):
        self.notes.append(message.value)

    @on(PeerRestarted)
    def restarted(self, message):
        self.restarts.append(message.name)


class Server(Actor):
    ROLE = "server"
    SENDS: ClassVar = {"sink": (Note,)}

    def __init__(self, ref, sink):
        super().__init__(ref)
        self.sink = sink
        self.worked = []

    @on(Ping)
    def ping(self, message, envelope):
        self.tell(self.sink, Note(message.value))
        self.answer(envelope, message.value + 1)

    @on(Boom)
    def boom(self, message, envelope):
        raise RuntimeError("boom")

    @on(Park)
    def park(self, message, envelope):
        pass

    @on(Slow)
    def slow(self, message):
        self.start_job(asyncio.sleep(message.seconds, "slept"), Worked, Worked)

    @on(Worked)
    def done(self, message):
        self.worked.append(message.value)


class Wired:
    def __init__(self, bound=4, budget=None):
        self.in_flight = InFlight()
        self.supervisor = Supervisor(self.in_flight, budget or RestartBudget())
        self.server = self.supervisor.make_ref(Server, bound)
        self.sink = self.supervisor.make_ref(Sink, 1)
        self.members = (
            Group("a", (ActorSpec(Server, lambda ref: Server(ref, self.sink), self.server),)),
            Group("b", (ActorSpec(Sink, Sink, self.sink),)),
        )

    def running(self, **options):
        return self.supervisor.running(*self.members, **options)


async def test_an_ask_is_answered_and_tells_keep_their_order_through_a_full_channel():
    wired = Wired()
    async with wired.running():
        assert await asyncio.gather(
            *(wired.server.ask(Ping(i), deadline=deadline_after(5)) for i in range(200))
        ) == list(range(1, 201))
        await wired.in_flight.wait_idle()
        assert wired.supervisor.actor("sink").notes == list(range(200))
        assert wired.sink.channel.statistics().peak == 1


async def test_a_failure_fails_every_waiting_ask_by_name_and_the_next_incarnation_serves():
    wired = Wired()
    async with wired.running():
        asks = [
            asyncio.create_task(wired.server.ask(message, deadline=deadline_after(5)))
            for message in (Park(), Boom(), Ping(1), Ping(2))
        ]
        results = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(r) for r in results] == [ActorFailed] * 4
        assert all(r.actor == "server" for r in results)
        assert await wired.server.ask(Ping(3), deadline=deadline_after(5)) == 4
        await wired.in_flight.wait_idle()
        assert wired.supervisor.actor("sink").restarts == ["server"]
        assert wired.supervisor.statistics().failures == 1
        assert wired.server.incarnation == 1


async def test_an_exhausted_restart_budget_fails_the_system_and_no_caller_hangs():
    wired = Wired(budget=RestartBudget(1, 60))
    async with wired.running():
        while wired.supervisor.failed is None:  # one that comes during the restart only fails
            with pytest.raises((ActorFailed, CacheFailed)):
                await wired.server.ask(Boom(), deadline=deadline_after(5))
            await asyncio.sleep(0)
        assert wired.supervisor.statistics().failures == 2
        with pytest.raises(CacheFailed):
            await wired.server.ask(Ping(1), deadline=deadline_after(5))
        assert isinstance(wired.supervisor.failed, RuntimeError)


async def test_a_deadline_covers_the_wait_for_capacity_and_for_the_answer():
    wired = Wired()
    async with wired.running(drain=0.1):
        began = now()
        with pytest.raises(DeadlineExceeded):
            await wired.server.ask(Park(), deadline=deadline_after(0.05))
        assert now() - began < 20
    lonely = Wired(bound=1)  # without a receiver: the channel fills up
    lonely.server.try_tell(Note(0))
    with pytest.raises(DeadlineExceeded):
        await lonely.server.ask(Ping(1), deadline=deadline_after(0.05))


async def test_a_cancelled_ask_is_withdrawn():
    wired = Wired()
    async with wired.running():

        async def asked():
            wired.server.try_tell(Slow(0.0))  # the ask waits behind it
            await wired.server.ask(Ping(7), deadline=deadline_after(5))

        task = asyncio.create_task(asked())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wired.in_flight.wait_idle()
        assert 7 not in wired.supervisor.actor("sink").notes
        assert wired.supervisor.actor("server").statistics().skipped == 1


async def test_job_results_and_failures_return_as_messages_and_jobs_end_with_their_actor():
    wired = Wired()
    async with wired.running():
        wired.server.try_tell(Slow(0.01))
        await wired.in_flight.wait_idle()
        server = wired.supervisor.actor("server")
        assert server.worked == ["slept"]
        wired.server.try_tell(Slow(60))
        await asyncio.sleep(0.01)
        assert server.statistics().jobs == 1
        with pytest.raises(ActorFailed):
            await wired.server.ask(Boom(), deadline=deadline_after(5))
        await server.mailbox.ended
        assert server.statistics().jobs == 0


async def test_an_actor_has_ended_when_its_jobs_have():
    ended = []

    async def job():
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            ended.append("job")

    wired = Wired()
    async with wired.running():
        server = wired.supervisor.actor("server")
        server.start_job(job(), lambda _: None, lambda _: None)
        await asyncio.sleep(0)
        with pytest.raises(ActorFailed):
            await wired.server.ask(Boom(), deadline=deadline_after(5))
        await server.mailbox.ended
        assert ended == ["job"]


async def test_a_failed_first_start_is_raised():
    def broken(ref):
        raise OSError("no such device")

    wired = Wired()
    group = Group("a", (ActorSpec(Sink, broken, wired.sink),))
    with pytest.raises(OSError, match="no such device"):
        async with Supervisor(wired.in_flight, RestartBudget(0)).running(group):
            pass


async def test_a_failure_before_all_have_started_is_named_and_the_others_start():
    """A group restarts while a group after it has not been made for the first time."""
    failures = [OSError("no such device")]

    def late(ref):
        if failures:
            raise failures.pop()
        return Sink(ref)

    wired = Wired()
    first = Group("first", (ActorSpec(Sink, late, wired.sink),))
    second = Group(
        "second", (ActorSpec(Server, lambda ref: Server(ref, wired.sink), wired.server),)
    )
    for name in (
        "around",
        "around that",
        "and that",
    ):  # each starts the groups in it some steps later
        second = Group(name, (second,))
    supervisor = Supervisor(wired.in_flight, RestartBudget(1))
    async with supervisor.running(first, second):
        assert supervisor.statistics().restarts == 1
        assert supervisor.failed is None


async def test_a_misfit_graph_starts_nothing():
    wired = Wired()
    with pytest.raises(WiringError, match="sink, which is not wired"):
        async with wired.supervisor.running(wired.members[0]):
            pass

    class Back(Sink):
        ROLE = "sink"
        SENDS: ClassVar = {"server": (Slow,)}

    loop = (
        ActorSpec(Server, lambda ref: Server(ref, wired.sink), wired.server),
        ActorSpec(Back, Back, wired.sink),
    )
    with pytest.raises(WiringError, match="cycle"):
        async with wired.supervisor.running(*loop):
            pass


async def test_only_a_sent_ask_without_an_answer_is_open():
    """At every moment an open ask is in flight too, and so is one that waits for a place, so that
    at rest there is none."""
    ref = receiver("one")
    callers = [
        asyncio.create_task(ref.ask(Ping(value), deadline=deadline_after(5))) for value in (1, 2)
    ]
    assert ref.open_asks == 0, "no caller has run yet"
    await asyncio.sleep(0)
    assert ref.open_asks == 1, "the second waits for a place"
    for value, left in ((1, 1), (2, 0)):
        envelope = ref.channel.get_nowait()
        assert (ref.open_asks, ref.in_flight.count) == (1, 1 + left)
        envelope.reply.set_result(10 * value)
        ref.in_flight.end()
        assert (ref.open_asks, ref.in_flight.count) == (0, left), "its caller has not run since"
        await asyncio.sleep(0)
        assert ref.open_asks == ref.in_flight.count == left
    assert await asyncio.gather(*callers) == [10, 20]
    assert ref.open_asks == 0
