"""Direct turns: an ask of an actor that waits is handled in the step of its asker."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from contextvars import ContextVar
from typing import ClassVar

import anyio
import pytest

from kvactors.actor import loop, on
from kvactors.actor.clock import deadline_after
from kvactors.actor.instrument import Instrument
from kvactors.errors import ActorFailed
from kvactors.testing.loop import SimLoop, simulate
from tests.actor.test_actor import Boom, Note, Park, Ping, Server, Slow, Wired, Worked

WHO = ContextVar("who", default="nobody")


@pytest.fixture(autouse=True)
def any_time(monkeypatch):
    """A busy machine takes the processor from a test for longer than direct turns may take."""
    monkeypatch.setattr(loop, "TIME", 30.0)


class Observed(Server):
    """Notes the order of its turns, and whose context variables they see."""

    def __init__(self, ref, sink):
        super().__init__(ref, sink)
        self.turns_seen, self.contexts = [], []

    @on(Ping)
    def ping(self, message, envelope):
        self.turns_seen.append(message.value)
        self.contexts.append(WHO.get())
        self.start_job(self._job(), Worked, Worked)
        super().ping(message, envelope)

    async def _job(self):
        self.contexts.append(WHO.get())

    @on(Note)
    def note(self, message):
        self.turns_seen.append(message.value)


class Quick(Server):
    """Answers, and sends nothing."""

    @on(Ping)
    def ping(self, message, envelope):
        self.answer(envelope, message.value + 1)


def wired(kind=Observed):
    system = Wired()
    spec = system.members[0].members[0]
    made = spec._replace(factory=lambda ref: kind(ref, system.sink))
    system.members = (system.members[0]._replace(members=(made,)), system.members[1])
    return system


def in_one_step(work):
    """The result of a coroutine if it never suspends, else None. It is closed then."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    return None


def ask(system, message):
    return system.server.ask(message, deadline=deadline_after(30))


async def test_an_ask_of_a_waiting_actor_needs_no_pass_of_the_loop():
    system = Wired()
    async with system.running():
        assert in_one_step(ask(system, Ping(1))) == 2
        assert system.server.open_asks == 0
        await system.in_flight.wait_idle()
        statistics = system.supervisor.actor("server").statistics()
        assert statistics.turns == statistics.channel.taken == 1
        assert system.supervisor.actor("sink").notes == [1]


async def test_it_overtakes_no_message():
    system = wired()
    async with system.running():
        server = system.supervisor.actor("server")

        async def in_order():
            assert system.server.try_tell(Note(1))
            return await ask(system, Ping(2))

        assert await asyncio.create_task(in_order()) == 3
        assert server.turns_seen == [1, 2]


async def test_an_unanswered_direct_ask_waits_like_any_other():
    system = Wired()
    async with system.running():
        parked = asyncio.create_task(ask(system, Park()))
        await asyncio.sleep(0)
        assert system.server.open_asks == 1
        parked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await parked
        assert system.server.open_asks == 0


@pytest.mark.parametrize("seconds", [30.0, -1.0])
async def test_direct_turns_in_one_pass_are_bounded(monkeypatch, seconds):
    monkeypatch.setattr(loop, "TIME", seconds)
    system = wired(Quick)
    async with system.running():
        for _ in range(2):
            count = 0
            while in_one_step(ask(system, Ping(count))) is not None:
                count += 1
                assert count <= loop.TURNS
            assert count == (loop.TURNS if seconds > 0 else 1)
            await system.in_flight.wait_idle()
            await asyncio.sleep(0)


async def test_a_caller_that_never_waits_lets_others_run():
    system = wired(Quick)
    async with system.running():
        ran = 0

        async def other():
            nonlocal ran
            while True:
                ran += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for value in range(20 * loop.TURNS):
            await ask(system, Ping(value))
        task.cancel()
        assert ran >= 19


async def test_turns_and_their_jobs_run_in_the_context_of_the_actor():
    system = wired()
    async with system.running():
        WHO.set("asker")
        assert in_one_step(ask(system, Ping(1))) == 2
        await system.in_flight.wait_idle()
        assert system.supervisor.actor("server").contexts == ["nobody", "nobody"]


async def test_an_exception_fails_the_actor_and_not_the_asker():
    system = Wired()
    async with system.running():
        first = asyncio.create_task(ask(system, Boom()))
        second = asyncio.create_task(ask(system, Ping(1)))
        with pytest.raises(ActorFailed, match="boom"):
            await first
        with pytest.raises(ActorFailed, match="boom"):
            await second
        while system.server.incarnation == 0 or system.server.direct is None:
            await asyncio.sleep(0.001)
        assert in_one_step(ask(system, Ping(1))) == 2
        assert system.supervisor.statistics().restarts == 1


async def test_an_error_of_a_direct_turn_keeps_nothing_alive():
    class Refusing(Server):
        @on(Ping)
        def ping(self, message, envelope):
            self.refuse(envelope, LookupError("refused"))

    class Held:
        pass

    async def refused(system):
        held = Held()
        with suppress(LookupError):
            await ask(system, Ping(1))
            raise AssertionError("not refused")
        return weakref.ref(held)

    system = wired(Refusing)
    async with system.running():
        gc.disable()
        try:
            assert (await refused(system))() is None
        finally:
            gc.enable()


async def test_messages_to_a_full_receiver_leave_without_another_message():
    system = Wired()
    async with system.running():
        for value in range(8):
            with anyio.fail_after(30):
                assert await ask(system, Ping(value)) == value + 1
        with anyio.fail_after(30):
            await system.in_flight.wait_idle()
        assert system.supervisor.actor("sink").notes == list(range(8))


async def test_the_last_messages_to_a_full_receiver_leave_too():
    system = Wired()
    async with system.running():
        assert in_one_step(ask(system, Ping(1))) == 2
        assert in_one_step(ask(system, Ping(2))) == 3
        assert in_one_step(ask(system, Ping(3))) is None, "the actor waits for a place"
        with anyio.move_on_after(30):
            await system.in_flight.wait_idle()
        assert system.supervisor.actor("sink").notes[:2] == [1, 2]


async def test_the_end_of_a_system_ends_direct_turns():
    system = Wired()
    async with system.running():
        assert system.server.try_tell(Slow(0.0))
    assert system.server.direct is None


async def test_instruments_see_a_direct_turn():
    seen = []

    class Log(Instrument):
        def sent(self, receiver, envelope, turn):
            seen.append(("sent", type(envelope.message)))

        def taken(self, receiver, envelope):
            seen.append(("taken", type(envelope.message)))

        def answered(self, receiver, envelope, value, error):
            seen.append(("answered", value))

        def finished(self, receiver, envelope):
            seen.append(("finished", type(envelope.message)))

    system = Wired()
    async with system.running():
        system.server.instruments.add(Log())
        assert in_one_step(ask(system, Ping(1))) == 2
        assert seen == [
            ("sent", Ping),
            ("taken", Ping),
            ("sent", Note),
            ("answered", 2),
            ("finished", Ping),
        ]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 20, 80), (1.0, 100, 100)])
def test_a_loop_of_virtual_time_draws_direct_turns_from_its_seed(share, least, most):
    async def run():
        system = wired(Quick)
        async with system.running():
            count = 0
            for value in range(100):
                await asyncio.sleep(0.001)
                count += in_one_step(ask(system, Ping(value))) is not None
            return count

    first, again = (simulate(run, loop=SimLoop(1, direct=share)) for _ in range(2))
    assert first == again
    assert least <= first <= most


async def test_no_message_is_handled_after_an_exception():
    class Halfway(Server):
        """Sends itself a message, and fails in the same turn."""

        handled: ClassVar[list[int]] = []

        @on(Ping)
        def ping(self, message, envelope):
            self.to_self(Worked(message.value))
            raise ValueError("halfway")

        @on(Worked)
        def worked(self, message):
            self.handled.append(message.value)

    system = wired(Halfway)
    async with system.running():
        with pytest.raises(ActorFailed, match="halfway"):
            await ask(system, Ping(1))
        await system.in_flight.wait_idle()
        assert Halfway.handled == []
        assert system.supervisor.statistics().restarts == 1


async def test_an_ask_in_a_direct_turn_is_not_nested():
    """A finaliser or an eager task may ask in the middle of a turn."""
    nested = []

    class Reentered(Server):
        @on(Ping)
        def ping(self, message, envelope):
            if message.value == 1:
                nested.append(in_one_step(ask(system, Ping(2))))
            self.answer(envelope, message.value + 1)

    system = wired(Reentered)
    async with system.running():
        assert in_one_step(ask(system, Ping(1))) == 2
        assert nested == [None]
