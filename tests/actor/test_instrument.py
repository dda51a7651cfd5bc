"""Instruments: every message, turn and failure of a system is observed, and none fails an actor."""

from __future__ import annotations

import logging
from typing import ClassVar

import pytest

from kvactors.actor import (
    Actor,
    ActorSpec,
    Ask,
    Control,
    Group,
    InFlight,
    InjectedFailure,
    Instrument,
    Message,
    Supervisor,
    on,
)
from kvactors.errors import ActorFailed
from tests.support.deadline import deadline_after


class Order(Ask[int], frozen=True, eq=False):
    parts: int


class Part(Message, frozen=True, eq=False):
    number: int


class Made(Control, frozen=True, eq=False):
    number: int


class Break(Message, frozen=True, eq=False):
    pass


class Shop(Actor):
    """Answers an order when the workshop has made all its parts."""

    ROLE = "shop"
    SENDS: ClassVar = {"workshop": (Part,)}

    def __init__(self, ref, workshop):
        super().__init__(ref)
        self.workshop, self.envelope, self.missing = workshop, None, 0

    @on(Order)
    def order(self, message, envelope):
        self.envelope, self.missing = envelope, message.parts
        for number in range(message.parts):
            self.tell(self.workshop, Part(number))

    @on(Made)
    def made(self, message):
        self.missing -= 1
        if not self.missing:
            self.answer(self.envelope, 7)

    @on(Break)
    def fail(self, message):
        raise RuntimeError("broken")


class Workshop(Actor):
    ROLE = "workshop"
    SENDS: ClassVar = {"shop": (Made,)}

    def __init__(self, ref, shop):
        super().__init__(ref)
        self.shop = shop

    @on(Part)
    def part(self, message):
        self.tell(self.shop, Made(message.number))


class Recorder(Instrument):
    def __init__(self):
        self.events, self.causes = [], {}

    def sent(self, receiver, envelope, turn):
        kind = type(envelope.message).__name__
        by = "outside" if turn is None else turn.actor.name
        self.events.append(f"sent {kind} {by} -> {receiver.name}")
        self.causes[envelope.message] = turn and turn.envelope.message

    def dropped(self, receiver, envelope):
        self.events.append(f"dropped {type(envelope.message).__name__}")

    def taken(self, receiver, envelope):
        self.events.append(f"taken {type(envelope.message).__name__}")

    def finished(self, receiver, envelope):
        self.events.append(f"finished {type(envelope.message).__name__}")

    def answered(self, receiver, envelope, value, error):
        self.events.append(f"answered {type(envelope.message).__name__} {value} {error!r}")

    def failed(self, actor, error):
        self.events.append(f"failed {actor.name} {error}")

    def started(self, actor):
        self.events.append(f"started {actor.ref.name}")

    def stopped(self, actor):
        self.events.append(f"stopped {actor.ref.name}")


class Wired:
    def __init__(self, *instruments, bound=8):
        self.in_flight = InFlight()
        self.supervisor = Supervisor(self.in_flight)
        self.shop = self.supervisor.make_ref(Shop, 8)
        self.workshop = self.supervisor.make_ref(Workshop, bound)
        for instrument in instruments:
            self.supervisor.instruments.add(instrument)

    def running(self):
        shop = ActorSpec(Shop, lambda ref: Shop(ref, self.workshop), self.shop)
        workshop = ActorSpec(Workshop, lambda ref: Workshop(ref, self.shop), self.workshop)
        return self.supervisor.running(Group("all", (shop, workshop)))

    async def order(self, parts=1):
        return await self.shop.ask(Order(parts), deadline=deadline_after(60))


async def test_every_event_of_an_ask_in_order():
    recorder = Recorder()
    wired = Wired(recorder)
    async with wired.running():
        assert await wired.order() == 7
        await wired.in_flight.wait_idle()
    assert recorder.events[:2] == ["started shop", "started workshop"]
    assert recorder.events[2:12] == [
        "sent Order outside -> shop",
        "taken Order",
        "sent Part shop -> workshop",
        "finished Order",
        "taken Part",
        "sent Made workshop -> shop",
        "finished Part",
        "taken Made",
        "answered Order 7 None",
        "finished Made",
    ]
    assert recorder.events[-1].startswith("stopped")
    assert wired.supervisor.instruments.turn is None


@pytest.mark.parametrize("bound", [1, 8])
async def test_every_message_is_traced_to_the_ask_that_caused_it(bound):
    """Also those that waited in the sender's outbox for a place in the channel."""
    recorder = Recorder()
    wired = Wired(recorder, bound=bound)
    async with wired.running():
        await wired.order(parts=6)
    parts = [message for message in recorder.causes if isinstance(message, Part)]
    made = [message for message in recorder.causes if isinstance(message, Made)]
    assert len(parts) == len(made) == 6
    assert {type(recorder.causes[part]) for part in parts} == {Order}
    assert [recorder.causes[one].number for one in made] == [one.number for one in made]


EVENTS = ("sent", "taken", "finished", "answered", "dropped", "failed", "started", "stopped")


@pytest.mark.parametrize("event", EVENTS)
async def test_an_instrument_that_raises_is_removed_and_fails_no_actor(event, caplog):
    class Broken(Instrument):
        calls = 0

    def broken(*_):
        Broken.calls += 1
        raise RuntimeError(f"cannot observe {event}")

    setattr(Broken, event, staticmethod(broken))
    recorder = Recorder()
    wired = Wired(Broken(), recorder)
    with caplog.at_level(logging.ERROR, "kvactors"):
        async with wired.running():
            assert await wired.order() == 7
            if event in ("dropped", "failed"):
                wired.shop.try_tell(Break())
                with pytest.raises(ActorFailed, match="broken"):
                    await wired.order()
            assert await wired.order(3) == 7
    assert Broken.calls == 1
    lines = [line for line in caplog.messages if "instrument removed" in line]
    assert len(lines) == 1
    assert f"cannot observe {event}" in lines[0]
    assert wired.supervisor.statistics().failures == (event in ("dropped", "failed"))
    assert wired.supervisor.instruments.active == (recorder,)
    assert sum("answered Order 7" in one for one in recorder.events) == 2


@pytest.mark.parametrize("when", ["taken", "finished"])
async def test_an_injected_failure_fails_the_actor_before_or_after_its_turn(when):
    class Once(Instrument):
        done = False

    def inject(self, receiver, envelope):
        if isinstance(envelope.message, Order) and not Once.done:
            Once.done = True
            raise InjectedFailure(f"planned, {when}")

    setattr(Once, when, inject)
    recorder = Recorder()
    wired = Wired(recorder, Once())
    async with wired.running():
        with pytest.raises(ActorFailed, match=f"planned, {when}"):
            await wired.order()
        await wired.in_flight.wait_idle()  # restarted
        assert await wired.order() == 7
        assert wired.supervisor.statistics().failures == 1
    begin = recorder.events.index("taken Order")
    failed = recorder.events.index(f"failed shop planned, {when}")
    assert ("sent Part shop -> workshop" in recorder.events[begin:failed]) == (when == "finished")
