"""Asks that an actor answers in one step, and asks that wait for a pass with direct turns."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from contextlib import suppress

import anyio
import pytest

from kvactors.actor import ActorRef, InFlight, loop, on
from kvactors.actor.channel import Channel
from kvactors.actor.instrument import Instrument
from kvactors.actor.loop import DirectTurns
from kvactors.errors import ActorFailed, ChannelClosed
from kvactors.testing.loop import SimLoop, simulate
from tests.actor.test_actor import Note, Ping, Server
from tests.actor.test_direct import ask, in_one_step, wired


@pytest.fixture(autouse=True)
def any_time(monkeypatch):
    """A busy machine takes the processor from a test for longer than direct turns may take."""
    monkeypatch.setattr(loop, "TIME", 30.0)


class Answering(Server):
    """Answers pings in one step, except those below 0. Notes what it did with each message: a
    handler in a direct turn runs in the task of the asker."""

    def __init__(self, ref, sink):
        super().__init__(ref, sink)
        self.seen = []
        self.answerers = {Ping: self.at_once}

    def started(self):
        self.task = asyncio.current_task()

    def at_once(self, message):
        if message.value < 0:
            return None
        self.seen.append(("at once", message.value))
        return message.value + 1

    @on(Ping)
    def ping(self, message, envelope):
        own = asyncio.current_task() is self.task
        self.seen.append(("handled" if own else "direct", message.value))
        self.answer(envelope, message.value + 1)

    @on(Note)
    def note(self, message):
        self.seen.append(("note", message.value))


class Failing(Answering):
    def at_once(self, message):
        if message.value == 7:
            raise ValueError("seven")
        return super().at_once(message)


async def asked(system, message):
    """As a hot call asks: an answer in one step first."""
    turns = system.server.direct
    found = None if turns is None else turns.answer(message)
    return await ask(system, message) if found is None else found


def seen(system):
    return system.supervisor.actor("server").seen


async def passes(count=6):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_answer_in_one_step_is_a_turn_of_the_actor():
    system = wired(Answering)
    async with system.running():
        await passes()
        assert in_one_step(asked(system, Ping(1))) == 2
        assert seen(system) == [("at once", 1)]
        statistics = system.supervisor.actor("server").statistics()
        assert statistics.turns == statistics.channel.taken == 1
        assert system.in_flight.count == 0
        ended = system.supervisor.actor("server")
        with suppress(ActorFailed):
            await asked(system, Ping(None))
        await system.in_flight.wait_idle()
        statistics = system.supervisor.actor("server").statistics()
        assert system.supervisor.actor("server") is not ended
        assert (statistics.turns, statistics.channel.taken) == (0, 2)
        assert await asked(system, Ping(1)) == 2
        assert ended.turns == 1
        assert system.supervisor.actor("server").turns == 1


async def test_what_has_no_answer_in_one_step_is_handled():
    system = wired(Answering)
    async with system.running():
        await passes()
        assert in_one_step(asked(system, Ping(-3))) == -2
        assert in_one_step(asked(system, Ping(1))) == 2
        assert seen(system) == [("direct", -3), ("at once", 1)]
        assert system.server.direct.answer(Note(1)) is None


async def test_an_exception_fails_the_actor_once():
    system = wired(Failing)
    async with system.running():
        await passes()
        first, second = (asyncio.create_task(asked(system, Ping(value))) for value in (7, 1))
        results = await asyncio.gather(first, second, return_exceptions=True)
        for failed in results:
            assert isinstance(failed, ActorFailed)
            assert "seven" in str(failed)
        await system.in_flight.wait_idle()
        assert await asked(system, Ping(1)) == 2
        assert system.supervisor.statistics().failures == 1
        assert system.in_flight.count == 0


def alone(kind=Answering):
    """The direct turns of an actor that waits, without a supervisor."""
    in_flight = InFlight()
    ref = ActorRef("server", "server", Channel("server", 4), in_flight)
    actor = kind(ref, ActorRef("sink", "sink", Channel("sink", 4), in_flight))
    ref.direct, ref.channel.idle = DirectTurns(actor), True
    return ref, actor


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_reaches_the_asker_and_the_actor(error):
    class Interrupted(Answering):
        def at_once(self, message):
            raise error

    ref, _ = alone(Interrupted)
    turns = ref.direct
    with pytest.raises(error):
        turns.answer(Ping(1))
    assert ref.direct is None
    assert not ref.channel.idle
    assert ref.in_flight.count == 1
    assert type(turns.pop_broken()) is error
    assert ref.in_flight.count == 0


async def test_nothing_is_answered_past_instruments():
    log = Counter()

    class Log(Instrument):
        def taken(self, receiver, envelope):
            log[type(envelope.message)] += 1

    system = wired(Answering)
    async with system.running():
        await passes()
        system.server.instruments.add(Log())
        assert await asked(system, Ping(1)) == 2
        assert seen(system) == [("direct", 1)]
        assert log[Ping] == 1


async def test_an_ask_past_instruments_does_not_wait_for_a_pass(monkeypatch):
    monkeypatch.setattr(loop, "TURNS", 1)
    system = wired(Answering)
    async with system.running():
        await passes()
        assert in_one_step(asked(system, Ping(1))) == 2
        turns = system.server.direct
        assert turns.is_spent
        system.server.instruments.add(Instrument())
        assert not turns.is_spent


async def test_a_pass_that_begins_with_an_ask_that_has_waited_has_an_end(monkeypatch):
    """Later passes have direct turns as well."""
    monkeypatch.setattr(loop, "TURNS", 1)
    system = wired(Answering)
    async with system.running():
        await passes()
        assert await asyncio.gather(*(asked(system, Ping(value)) for value in (1, 2))) == [2, 3]
        for value in (3, 4):
            await passes()
            assert in_one_step(asked(system, Ping(value))) == value + 1


async def test_an_ask_in_an_answer_is_not_nested():
    """A finaliser may ask in the middle of it."""
    nested = []

    class Reentered(Answering):
        def at_once(self, message):
            if message.value == 1:
                nested.append(in_one_step(asked(system, Ping(2))))
                gc.collect()
            return super().at_once(message)

    system = wired(Reentered)
    async with system.running():
        await passes()
        assert in_one_step(asked(system, Ping(1))) == 2
        assert nested == [None]
        assert seen(system)[0] == ("at once", 1)


async def test_an_answer_overtakes_no_message():
    system = wired(Answering)
    async with system.running():
        await passes()
        assert system.server.try_tell(Note(1))
        assert system.server.direct.answer(Ping(2)) is None
        assert await asked(system, Ping(2)) == 3
        assert seen(system) == [("note", 1), ("handled", 2)]


async def test_an_ask_beyond_the_bound_waits_for_a_pass(monkeypatch):
    monkeypatch.setattr(loop, "TURNS", 2)
    system = wired(Answering)
    async with system.running():
        await passes()
        assert [in_one_step(asked(system, Ping(value))) for value in range(3)] == [1, 2, None]
        await system.in_flight.wait_idle()
        await passes()
        before = system.supervisor.actor("server").statistics().channel.peak
        assert [await asked(system, Ping(value)) for value in (10, 11, 12, -5)] == [11, 12, 13, -4]
        assert seen(system)[2:] == [
            ("at once", 10),
            ("at once", 11),
            ("at once", 12),
            ("direct", -5),
        ]
        assert system.supervisor.actor("server").statistics().channel.peak == before, (
            "an ask went through the channel"
        )


async def served(clients, each, system):
    """Each client asks without a pause. Returns the direct turns by pass, and the largest lead of a
    client at the end of a pass."""
    done, turns, lead = [0] * clients, [], 0

    async def client(number):
        for _ in range(each):
            await asked(system, Ping(number))
            done[number] += 1

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    before, count = 0, asyncio.gather(*tasks)
    while not count.done():
        await asyncio.sleep(0)
        turns.append(sum(kind != "handled" for kind, _ in seen(system)[before:]))
        before = len(seen(system))
        running = [number for number in done if number < each]
        lead = max(lead, max(running, default=0) - min(running, default=0))
    await count
    return turns, lead


@pytest.mark.parametrize("clients", [1, 8, 64, 1000])
async def test_clients_share_the_turns_of_a_pass(monkeypatch, clients):
    monkeypatch.setattr(loop, "TURNS", 16)
    system = wired(Answering)
    async with system.running():
        await passes()
        turns, lead = await served(clients, 40, system)
        assert sum(turns) == 40 * clients
        assert max(turns) <= 2 * max(16, clients), "a pass has too many turns"
        assert lead <= 16 + 1, "a client waits while another one is served"
        assert system.in_flight.count == 0


@pytest.mark.parametrize("clients", [2, 30])
@pytest.mark.parametrize("answers", [True, False])
async def test_turns_of_a_pass_end_in_time(clients, answers):
    """By a clock that each turn moves on. Without answers every ask is handled."""

    class Timed(Answering):
        clock, slow = 0.0, 0.11

        def __init__(self, ref, sink):
            super().__init__(ref, sink)
            if not answers:
                self.answerers = {}

        def at_once(self, message):
            Timed.clock += self.slow
            return super().at_once(message)

        @on(Ping)
        def ping(self, message, envelope):
            Timed.clock += self.slow
            super().ping(message, envelope)

    system = wired(Timed)
    async with system.running():
        await passes()
        system.server.direct._clock = lambda: Timed.clock
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "TIME", 1.0)
            turns, _ = await served(clients, 30, system)
        assert sum(turns) > 0
        assert len(seen(system)) == 30 * clients
        # One and a half times the time of a pass, a share of the last one, and a turn.
        assert max(turns) <= (1.5 + 1.0 / clients) / 0.11 + 2


async def test_a_cancelled_ask_that_waits_for_a_pass_is_not_made(monkeypatch):
    monkeypatch.setattr(loop, "TURNS", 1)
    system = wired(Answering)
    async with system.running():
        await passes()
        task = asyncio.create_task(asked(system, Ping(2)))
        assert in_one_step(asked(system, Ping(1))) == 2
        await asyncio.sleep(0)
        assert system.in_flight.count == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert system.in_flight.count == 0
        await passes()
        assert seen(system) == [("at once", 1)]
        assert system.server.open_asks == 0


async def test_messages_put_before_it_come_first(monkeypatch):
    monkeypatch.setattr(loop, "TURNS", 1)
    system = wired(Answering)
    async with system.running():
        await passes()
        tasks = [asyncio.create_task(asked(system, Ping(value))) for value in (1, 2, 3)]
        await asyncio.sleep(0)
        assert seen(system) == [("at once", 1)]
        assert system.server.try_tell(Note(9))
        assert await asyncio.gather(*tasks) == [2, 3, 4]
        assert seen(system) == [("at once", 1), ("note", 9), ("handled", 2), ("handled", 3)]


async def test_asks_that_wait_while_the_actor_restarts(monkeypatch):
    monkeypatch.setattr(loop, "TURNS", 2)
    system = wired(Failing)
    async with system.running():
        await passes()
        tasks = [asyncio.create_task(asked(system, Ping(value))) for value in (1, 2, 3, 7, 4)]
        with anyio.fail_after(30):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[:3] == [2, 3, 4]
        assert isinstance(results[3], ActorFailed)
        assert results[4] == 5 or isinstance(results[4], ActorFailed)
        with anyio.fail_after(30):
            await system.in_flight.wait_idle()
        assert await asked(system, Ping(8)) == 9
        assert system.supervisor.statistics().failures == 1


async def test_asks_that_wait_while_the_actor_stops(monkeypatch):
    monkeypatch.setattr(loop, "TURNS", 1)
    system = wired(Answering)
    async with system.running():
        await passes()
        tasks = [asyncio.create_task(asked(system, Ping(value))) for value in range(8)]
        await asyncio.sleep(0)
    with anyio.fail_after(30):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for value, result in enumerate(results):
        assert result == value + 1 or isinstance(result, (ChannelClosed, ActorFailed))
    assert system.in_flight.count == 0
    assert system.server.open_asks == 0


async def mixed():
    """Clients that are cancelled now and then. Returns all that happened, in order."""
    system, log = wired(Failing), []
    async with system.running():
        await passes()

        async def client(number):
            for step in range(12):
                value = [number, -number, 7 if step == number else 1][step % 3]
                with suppress(ActorFailed):
                    log.append((number, step, await asked(system, Ping(value))))

        tasks = [asyncio.create_task(client(number)) for number in range(10)]
        for number in (3, 5):
            await asyncio.sleep(0)
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await system.in_flight.wait_idle()
        log.append(system.supervisor.statistics().failures)
    return log


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_run_on_virtual_time_repeats_from_its_seed(monkeypatch, share):
    monkeypatch.setattr(loop, "TURNS", 3)
    runs = {}
    for seed in range(20):
        first, again = (simulate(mixed, loop=SimLoop(seed, direct=share)) for _ in range(2))
        assert first == again
        runs[seed] = str(first)
    assert len(set(runs.values())) > 10, "the seed has no influence"


def test_clients_of_another_event_loop_share_a_pass(monkeypatch):
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(loop, "TURNS", 16)

    async def run():
        system = wired(Answering)
        async with system.running():
            await passes()
            turns, lead = await served(64, 20, system)
            assert sum(turns) == 20 * 64
            assert max(turns) <= 2 * 64
            assert lead <= 17
            assert system.in_flight.count == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
