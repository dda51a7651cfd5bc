"""Message traces: every message between the actors of a wired system, with its time, its turn and
what it caused.

A trace listens at the channels it is attached to; nothing in the core knows of it, and the schedule
is the same with and without. Of the last `limit` messages it keeps words, no bytes; on a simulated
loop the words of a run are the same, byte for byte, in every run of its seed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvactors.actor import ActorRef, Channel, Control, Envelope, Message
from kvactors.actor.clock import now
from kvactors.actor.jobs import Jobs
from kvactors.testing.loop import SimLoop
from kvactors.testing.words import describe, fields_of

if TYPE_CHECKING:
    from kvactors.system import System

Link = tuple[Any, ...]
"""What ties messages together: ("lease", number), ("request", name) or ("op", who chose the number,
number)."""


class Record:
    """One message, or one answer to an ask.

    number: counted from the trace's beginning. at: seconds on the loop's clock when it was put.
    sender, receiver: actors by name, other tasks by their label. kind: type of the message; fields:
    the rest of it in words. cause: number of the message in whose turn it was told. turn: the
    receiver's turn that took it; None while it is queued, and for answers. ask: number of the ask
    that this answers, 0 if it answers none.
    """

    __slots__ = (
        "ask",
        "at",
        "cause",
        "fields",
        "forward",
        "kind",
        "links",
        "number",
        "receiver",
        "sender",
        "turn",
    )

    def __init__(
        self,
        number: int,
        at: float,
        sender: str,
        receiver: str,
        kind: str,
        fields: str,
        cause: int | None,
    ) -> None:
        self.number = number
        self.at = at
        self.sender = sender
        self.receiver = receiver
        self.kind = kind
        self.fields = fields
        self.cause = cause
        self.turn: int | None = None
        self.forward = False
        self.ask = 0
        self.links: frozenset[Link] = frozenset()

    def swap(self, other: Record) -> None:
        """Change places with another: everything but the number."""
        for name in self.__slots__:
            if name != "number":
                mine, its = getattr(self, name), getattr(other, name)
                setattr(self, name, its)
                setattr(other, name, mine)


class TracedChannel(Channel[Envelope[Any]]):
    """What a traced channel is while it is traced."""

    trace: Trace
    receiver: str

    def put_control(self, item: Envelope[Any]) -> None:
        """See `Channel.put_control`."""
        super().put_control(item)
        self.trace.put(self.receiver, item)

    def get_nowait(self) -> Envelope[Any] | None:
        """See `Channel.get_nowait`."""
        item = super().get_nowait()
        if item is not None:
            self.trace.taken(self.receiver, item)
        return item

    def purge(self) -> Iterator[Envelope[Any]]:
        """See `Channel.purge`; who purges is not the actor, and takes no turn."""
        while (item := Channel.get_nowait(self)) is not None:
            self.trace.dropped(item)
            yield item

    def _append(self, item: Envelope[Any]) -> None:
        super()._append(item)
        self.trace.put(self.receiver, item)


def traced_envelope(trace: Trace) -> type[Envelope[Any]]:
    """What the envelope of a traced ask is: it reports its answer when that is given."""

    class Traced(Envelope[Any]):
        __slots__ = ()

        def answer(self, value: Any) -> bool:
            given = super().answer(value)
            if given:
                trace.answered(self, "answer", value)
            return given

        def fail(self, error: Exception) -> bool:
            given = super().fail(error)
            if given:
                trace.answered(self, "refusal", error)
            return given

    return Traced


class Trace:
    """The last `limit` messages of what it is attached to."""

    def __init__(self, limit: int = 20_000) -> None:
        self.records: deque[Record] = deque(maxlen=limit)
        self.count = 0
        self._queued: dict[
            int, Record
        ] = {}  # by id of the envelope, which lives as long as it is queued
        self._asks: dict[
            int, tuple[Envelope[Any], Record]
        ] = {}  # those that are open, by id of the envelope
        self._traced = traced_envelope(self)
        self._turns: dict[str, int] = {}
        self._current: WeakKeyDictionary[asyncio.Task[Any], tuple[str, int]] = WeakKeyDictionary()
        self._owners: dict[
            tuple[str, int], str
        ] = {}  # who chose the number of an operation that an actor was told of

    def attach(self, system: System) -> None:
        """Listen at every channel of a system (of an open cache: `cache.system`)."""
        refs = [
            system.index,
            system.swapper,
            system.evictor,
            *system.readers,
            *system.writers,
            system.notifier,
        ]
        for ref in refs if system.direct is None else [*refs, system.direct]:
            self.watch(ref)

    def watch(self, ref: ActorRef) -> None:
        """Listen at one ref's channel. ValueError if another trace does."""
        if type(ref.channel) is not Channel:
            raise ValueError(f"the channel of {ref.name} is listened to already")
        channel: Any = ref.channel
        channel.__class__ = TracedChannel
        channel.trace, channel.receiver = self, ref.name

    def __str__(self) -> str:
        return render(self.records)

    # -- what the channels report

    def put(self, receiver: str, envelope: Envelope[Any]) -> None:
        """A message lies in a channel."""
        sender, cause = self._sender(receiver)
        message = envelope.message
        record = self._add(sender, receiver, message, cause)
        record.forward = not isinstance(message, Control)
        record.links = frozenset(self._links(sender, receiver, message))
        self._queued[id(envelope)] = record
        if envelope.reply is not None:
            envelope.__class__ = self._traced
            self._asks[id(envelope)] = envelope, record
            envelope.reply.add_done_callback(lambda reply: self._over(id(envelope), reply))

    def taken(self, receiver: str, envelope: Envelope[Any]) -> None:
        """An actor took a message: its next turn."""
        self._turns[receiver] = turn = self._turns.get(receiver, 0) + 1
        record = self._queued.pop(id(envelope), None)
        task = asyncio.current_task()
        if record is not None:
            record.turn = turn
            if task is not None:
                self._current[task] = receiver, record.number

    def dropped(self, envelope: Envelope[Any]) -> None:
        """A message went with the life it was meant for."""
        self._queued.pop(id(envelope), None)

    def answered(self, envelope: Envelope[Any], how: str, value: Any) -> None:
        """An ask got its answer."""
        if id(envelope) in self._asks:
            _, ask = self._asks.pop(id(envelope))
            self._reply(ask, how, f": {describe(value)}", ask.receiver, ask.sender)

    def _over(self, key: int, reply: asyncio.Future[Any]) -> None:
        """An ask's future is done; what nobody gave as an answer is its deadline, or its asker who
        gave up."""
        if key not in self._asks:
            return
        _, ask = self._asks.pop(key)
        if reply.cancelled():
            self._reply(ask, "withdrawn", "", ask.sender, ask.receiver)
        else:
            self._reply(ask, "expired", "", ask.sender, ask.receiver)

    def _reply(self, ask: Record, how: str, words: str, sender: str, receiver: str) -> None:
        task = asyncio.current_task()
        _, cause = self._current.get(task, ("", None)) if task is not None else ("", None)
        record = self._add(sender, receiver, None, cause)
        record.kind, record.fields, record.links = (
            how,
            f"#{ask.number} {ask.kind}{words}",
            ask.links,
        )
        record.ask = ask.number
        self._in_order(record)

    def _in_order(self, record: Record) -> None:
        """Asks that end at once, with one cause, are listed in the order in which they were asked:
        they may be ended in the order of a set, which is another one in every run."""
        for earlier in islice(reversed(self.records), 1, None):
            if earlier.at != record.at:
                return
            if earlier.ask > record.ask and (earlier.kind, earlier.cause) == (
                record.kind,
                record.cause,
            ):
                earlier.swap(record)
                record = earlier

    # -- inner parts

    def _add(
        self, sender: str, receiver: str, message: Message | None, cause: int | None
    ) -> Record:
        self.count += 1
        kind, fields = ("", "") if message is None else (type(message).__name__, fields_of(message))
        record = Record(self.count, now(), sender, receiver, kind, fields, cause)
        self.records.append(record)
        return record

    def _sender(self, receiver: str) -> tuple[str, int | None]:
        """Who is running: an actor in a turn, a job of one, a timer, or somebody outside."""
        task = asyncio.current_task()
        if task is None:
            return f"{receiver}'s timer", None
        known = self._current.get(task)
        if known is not None:
            return known
        coro: Any = task.get_coro()
        frame = getattr(coro, "cr_frame", None)
        if frame is not None and frame.f_code is Jobs._run.__code__:
            return task.get_name(), None
        loop = task.get_loop()
        return (loop.label(task) if isinstance(loop, SimLoop) else task.get_name()), None

    def _links(self, sender: str, receiver: str, message: Any) -> Iterator[Link]:
        for name in ("lease", "request_id"):
            if (value := getattr(message, name, None)) is not None:
                yield name.removesuffix("_id"), value
        number = getattr(message, "op", getattr(getattr(message, "answer", None), "op", None))
        if number is None:
            return
        if not isinstance(message, Control):
            self._owners[receiver, number] = sender
            if len(self._owners) > (self.records.maxlen or 0):
                del self._owners[
                    next(iter(self._owners))
                ]  # the oldest, which has left the ring too
            yield "op", sender, number
        elif sender.startswith(
            receiver
        ):  # to itself: about an operation of its own, or one it was told of
            yield "op", self._owners.get((receiver, number), receiver), number
        else:
            yield "op", receiver, number


def minimal(
    trace: Trace,
    *,
    request: str | None = None,
    lease: int | None = None,
    op: tuple[str, int] | None = None,
) -> list[Record]:
    """What concerns one request, one lease or one operation (who chose its number, and the number):
    their own messages, those of the operations these began, and the answers. ValueError if none of
    the three is given."""
    given = {("request", request), ("lease", lease), ("op", *(op or (None, None)))}
    links: set[Link] = {link for link in given if link[-1] is not None}
    if not links:
        raise ValueError("a request, a lease or an operation must be given")
    kept: dict[int, Record] = {}
    grown = True
    while grown:
        before = len(kept), len(links)
        for record in trace.records:
            cause = kept.get(record.cause or 0)
            began = cause is not None and record.forward
            if record.links & links or began:
                kept[record.number] = record
                links |= record.links
        grown = (len(kept), len(links)) != before
    return [kept[number] for number in sorted(kept)]


HEAD = ("#", "time", "turn", "from", "to", "message", "")


def render(records: Iterable[Record]) -> str:
    """Records as an aligned table, one a line. time: seconds. turn: the receiver's that took it;
    `-` for an answer or if none did."""
    rows: list[Sequence[str]] = [HEAD]
    for one in records:
        turn = "-" if one.turn is None else str(one.turn)
        because = "" if one.cause is None else f"  (by #{one.cause})"
        rows.append(
            (
                str(one.number),
                f"{one.at:.4f}",
                turn,
                one.sender,
                one.receiver,
                one.kind,
                one.fields + because,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    right = {0, 1, 2}
    lines = (
        "  ".join(
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
