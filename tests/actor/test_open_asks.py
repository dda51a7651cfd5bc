"""Which calls of an actor count as unanswered: sent, in flight, and without an answer."""

from __future__ import annotations

import asyncio

from kvactors.actor import ActorRef, Ask, Channel, InFlight
from tests.support.deadline import deadline_after


class Ping(Ask[int], frozen=True, eq=False):
    value: int


async def test_only_a_sent_ask_without_an_answer_is_open():
    """At every moment an open ask is in flight too, and so is one that waits for a place, so that
    at rest there is none."""
    ref = ActorRef("one", "one", Channel("one", 1), InFlight())
    callers = [
        asyncio.create_task(ref.ask(Ping(value=value), deadline=deadline_after(5)))
        for value in (1, 2)
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
