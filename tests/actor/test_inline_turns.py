"""Inline turns: an ask of an actor that waits is handled in the step of its asker, and asks beyond
the bound of a pass wait in order."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from contextvars import ContextVar
from itertools import pairwise
from typing import ClassVar

import anyio
import pytest

from kvactors.actor import ActorRef, InFlight, loop, on
from kvactors.actor.channel import Channel
from kvactors.errors import ActorFailed
from kvactors.testing.loop import SimLoop, simulate
from tests.actor.test_actor import Boom, Note, Ping, Server, Wired, Worked
from tests.support.deadline import deadline_after

BAD = 1_000_000

WHO = ContextVar("who", default="nobody")


@pytest.fixture(autouse=True)
def any_time(monkeypatch):
    """A busy machine takes the processor from a test for longer than inline turns may take."""
    monkeypatch.setattr(loop, "INLINE_TIME_S", 30.0)


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
        assert system.supervisor.actor("server").turns == 1
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


@pytest.mark.parametrize("seconds", [30.0, -1.0])
async def test_inline_turns_in_one_pass_are_bounded(monkeypatch, seconds):
    monkeypatch.setattr(loop, "INLINE_TIME_S", seconds)
    system = wired(Quick)
    async with system.running():
        for _ in range(2):
            count = 0
            while in_one_step(ask(system, Ping(count))) is not None:
                count += 1
                assert count <= loop.INLINE_TURNS
            assert count == (loop.INLINE_TURNS if seconds > 0 else 1)
            await system.in_flight.wait_idle()
            await asyncio.sleep(0)


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
        while system.server.incarnation == 0 or system.server.entrance is system.server:
            await asyncio.sleep(0.001)
        assert in_one_step(ask(system, Ping(1))) == 2
        assert system.supervisor.statistics().restarts == 1


async def test_an_error_of_an_inline_turn_keeps_nothing_alive():
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


async def test_the_last_messages_to_a_full_receiver_leave_too():
    system = Wired()
    async with system.running():
        assert in_one_step(ask(system, Ping(1))) == 2
        assert in_one_step(ask(system, Ping(2))) == 3
        assert in_one_step(ask(system, Ping(3))) is None, "the actor waits for a place"
        with anyio.move_on_after(30):
            await system.in_flight.wait_idle()
        assert system.supervisor.actor("sink").notes[:2] == [1, 2]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 20, 80), (1.0, 100, 100)])
def test_a_loop_of_virtual_time_draws_inline_turns_from_its_seed(share, least, most):
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


async def test_an_ask_in_an_inline_turn_is_not_nested():
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
        await system.in_flight.wait_idle()
        assert system.supervisor.statistics().failures == 0


class Seen(Server):
    """Notes what it did with each message: an inline turn runs in the task of the asker. Fails on
    BAD."""

    def __init__(self, ref, sink):
        super().__init__(ref, sink)
        self.seen = []

    def started(self):
        self.task = asyncio.current_task()

    @on(Ping)
    def ping(self, message, envelope):
        if message.value == BAD:
            raise ValueError("bad")
        own = asyncio.current_task() is self.task
        self.seen.append(("handled" if own else "inline", message.value))
        self.answer(envelope, message.value + 1)

    @on(Note)
    def note(self, message):
        self.seen.append(("note", message.value))


def seen(system):
    return system.supervisor.actor("server").seen


async def passes(count=6):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_reaches_the_asker_and_the_actor(error):
    class Interrupted(Server):
        @on(Ping)
        def ping(self, message, envelope):
            raise error

    in_flight = InFlight()
    ref = ActorRef("server", "server", Channel("server", 4), in_flight)
    actor = Interrupted(ref, ActorRef("sink", "sink", Channel("sink", 4), in_flight))
    turns = loop.InlineTurns(actor)
    ref.entrance, ref.channel.idle = turns, True
    with pytest.raises(error):
        ref.entrance.begin_ask(Ping(1), deadline_after(30))
    assert ref.entrance is ref
    assert not ref.channel.idle
    assert in_flight.count == 1
    assert type(turns.pop_error()) is error
    assert in_flight.count == 0


async def test_an_ask_beyond_the_bound_waits_for_a_pass(monkeypatch):
    monkeypatch.setattr(loop, "INLINE_TURNS", 2)
    system = wired(Seen)
    async with system.running():
        await passes()
        assert [in_one_step(ask(system, Ping(value))) for value in range(3)] == [1, 2, None]
        await system.in_flight.wait_idle()
        await passes()
        before = system.supervisor.actor("server").statistics().channel.peak
        assert [await ask(system, Ping(value)) for value in (10, 11, 12, -5)] == [11, 12, 13, -4]
        assert seen(system)[2:] == [("inline", 10), ("inline", 11), ("inline", 12), ("inline", -5)]
        assert system.supervisor.actor("server").statistics().channel.peak == before, (
            "an ask went through the channel"
        )


async def served(clients, each, system):
    """Each client asks without a pause. Returns the inline turns by pass, and the largest lead of a
    client at the end of a pass."""
    done, turns, lead = [0] * clients, [], 0

    async def client(number):
        for _ in range(each):
            await ask(system, Ping(number))
            done[number] += 1

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    before, count = 0, asyncio.gather(*tasks)
    while not count.done():
        await asyncio.sleep(0)
        turns.append(sum(kind == "inline" for kind, _ in seen(system)[before:]))
        before = len(seen(system))
        running = [number for number in done if number < each]
        lead = max(lead, max(running, default=0) - min(running, default=0))
    await count
    return turns, lead


@pytest.mark.parametrize("clients", [1, 8, 64, 1000])
async def test_clients_share_the_turns_of_a_pass(monkeypatch, clients):
    monkeypatch.setattr(loop, "INLINE_TURNS", 16)
    monkeypatch.setattr(loop, "SHARE_TURNS", 2)
    system = wired(Seen)
    async with system.running():
        await passes()
        turns, lead = await served(clients, 40, system)
        assert sum(turns) == 40 * clients
        assert max(turns) <= 2 * max(16, clients), "a pass has too many turns"
        assert lead <= 16 + 2 * 2, "a client waits while another one is served"
        assert system.in_flight.count == 0


@pytest.mark.parametrize("clients", [2, 30])
async def test_turns_of_a_pass_end_in_time(clients):
    """By a clock that each turn moves on."""

    class Timed(Seen):
        clock = 0.0

        @on(Ping)
        def ping(self, message, envelope):
            Timed.clock += 0.11
            super().ping(message, envelope)

    system = wired(Timed)
    async with system.running():
        await passes()
        system.server.entrance._clock = lambda: Timed.clock
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "INLINE_TIME_S", 1.0)
            turns, _ = await served(clients, 30, system)
        assert sum(turns) > 0
        assert len(seen(system)) == 30 * clients
        # One and a half times the time of a pass, a share of the last one, and a turn.
        assert max(turns) <= (1.5 + 1.0 / clients) / 0.11 + 2


async def test_a_cancelled_ask_that_waits_for_a_pass_is_not_made(monkeypatch):
    monkeypatch.setattr(loop, "INLINE_TURNS", 1)
    system = wired(Seen)
    async with system.running():
        await passes()
        task = asyncio.create_task(ask(system, Ping(2)))
        assert in_one_step(ask(system, Ping(1))) == 2
        await asyncio.sleep(0)
        assert system.in_flight.count == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert system.in_flight.count == 0
        await passes()
        assert seen(system) == [("inline", 1)]
        assert system.server.open_asks == 0


async def test_asks_that_wait_while_the_actor_restarts(monkeypatch):
    monkeypatch.setattr(loop, "INLINE_TURNS", 2)
    system = wired(Seen)
    async with system.running():
        await passes()
        tasks = [asyncio.create_task(ask(system, Ping(value))) for value in (1, 2, 3, BAD, 4)]
        with anyio.fail_after(30):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[:3] == [2, 3, 4]
        assert isinstance(results[3], ActorFailed)
        assert results[4] == 5 or isinstance(results[4], ActorFailed)
        with anyio.fail_after(30):
            await system.in_flight.wait_idle()
        assert await ask(system, Ping(8)) == 9
        assert system.supervisor.statistics().failures == 1


async def test_a_pass_wakes_as_many_asks_as_share_its_turns(monkeypatch):
    monkeypatch.setattr(loop, "INLINE_TURNS", 4)
    monkeypatch.setattr(loop, "SHARE_TURNS", 2)
    system = wired(Seen)
    async with system.running():
        await passes()
        tasks = [asyncio.create_task(ask(system, Ping(value))) for value in range(9)]
        served = []
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            served.append(len(seen(system)))
        assert max(after - before for before, after in pairwise(served)) <= 2
        assert [value for _, value in seen(system)] == list(range(9))


async def test_an_actor_with_many_askers_is_idle_again_soon():
    system = wired(Seen)
    async with system.running():
        await passes()
        asyncio.get_running_loop().call_soon(system.server.try_tell, Note(0))
        turns, _ = await served(64, 20, system)
        assert sum(turns) >= 64 * 20 - loop.BUSY_ASKS, "asks keep the actor busy"
