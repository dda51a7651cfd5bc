"""Probe: an actor that the test plays. Messages of the code under test wait in its channel
until the test takes them."""

from __future__ import annotations

from typing import Any, TypeVar

import anyio

from kvactors.actor import ActorRef, Ask, Channel, Envelope, InFlight, Message
from kvactors.testing.trace import describe

M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Unexpected(AssertionError):
    """A probe received another message than the test expects, or none in time."""


class Probe(ActorRef):
    """A ref like any other to the actors that use it. Its messages go to the test.

    name: in the reports. role: as the channel graph names it (the name if None), which is what an
    actor's SENDS are checked against. bound: places in its data lane, which a test fills to see the
    sender wait. in_flight: of the system it stands in, so that what lies unexpected in the probe
    counts as in flight. ignored: types of messages that `expect` and `expect_nothing` pass over.
    """

    def __init__(
        self,
        name: str = "probe",
        role: str | None = None,
        *,
        bound: int = 1024,
        in_flight: InFlight | None = None,
        ignored: tuple[type[Message], ...] = (),
    ) -> None:
        super().__init__(name, role or name, Channel(name, bound), in_flight or InFlight())
        self.ignored = ignored
        self._asked: list[Envelope[Any]] = []

    async def expect(self, kind: type[M], within: float = 1.0) -> M:
        """The next message, which must be a `kind` and come within so many seconds of the loop's
        time. Unexpected names the message that came instead.

        Control messages overtake others in a probe's channel too.
        """
        message = await self._next(within)
        if message is None:
            raise Unexpected(
                f"{self.name} expected {kind.__name__} within {within} s, and nothing came"
            )
        if not isinstance(message, kind):
            rest = [describe(envelope.message) for envelope in self.channel.purge()]
            after = f"; after it: {', '.join(rest)}" if rest else ""
            raise Unexpected(
                f"{self.name} expected {kind.__name__}, and what came is {describe(message)}{after}"
            )
        return message

    async def expect_nothing(self, for_: float = 1.0) -> None:
        """Nothing may come for so many seconds of the loop's time: on a loop of virtual time that
        is no time at all. Unexpected if something does, or had come before."""
        message = await self._next(for_)
        if message is not None:
            raise Unexpected(
                f"{self.name} expected nothing for {for_} s, and what came is {describe(message)}"
            )

    def answer(self, ask: Ask[R], value: R) -> bool:
        """Answer an ask that `expect` returned; False if its asker does not wait any more.
        LookupError if there is no such ask."""
        return self.reply(self._take(ask), value)

    def refuse(self, ask: Ask[Any], error: Exception) -> bool:
        """Answer an ask that `expect` returned with an error. Returns and raises as `answer`."""
        return self.reply_error(self._take(ask), error)

    async def _next(self, within: float) -> Message | None:
        with anyio.move_on_after(within):
            while True:
                envelope = await self.channel.get()
                self.in_flight.end()
                self.instruments.notify("taken", self, envelope)
                if envelope.reply is not None:
                    self._asked.append(envelope)
                if not isinstance(envelope.message, self.ignored):
                    return envelope.message
        return None

    def _take(self, ask: Ask[R]) -> Envelope[R]:
        for envelope in self._asked:
            if envelope.message is ask:
                self._asked.remove(envelope)
                return envelope
        raise LookupError(f"{self.name} was not asked {describe(ask)}, or has answered it")
