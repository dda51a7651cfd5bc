"""Message traces: every message between the actors of a wired system, with its time, its turn and
what it caused.

A trace is an instrument of the systems it is attached to. The schedule is the same with and
without it. It keeps the last `limit` messages as text, without payloads. On a simulated loop the
text of a run is the same, byte for byte, in every run of its seed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from kvactors.actor import ActorRef, Control, Envelope, Instrument, Message, Turn
from kvactors.actor.clock import now
from kvactors.actor.context import is_job
from kvactors.identity import PLAIN, RequestScope
from kvactors.native import Path
from kvactors.testing.loop import SimLoop
from kvactors.types import HASH_BYTES

if TYPE_CHECKING:
    from kvactors.system import System

Link = tuple[Any, ...]
"""A link between messages: ("lease", number), ("request", name) or ("op", the actor that chose the
number, number)."""


@dataclass(slots=True, eq=False)
class Record:
    """One message, or one answer to an ask.

    number: counted from the trace's beginning. at: seconds on the loop's clock when it was put.
    sender, receiver: actors by name, other tasks by their label. kind: type of the message.
    fields: its other contents as text. cause: number of the message in whose turn it was sent.
    turn: the receiver's turn that took it, None while it is queued, and for answers.
    ask: number of the ask that this answers, 0 if it answers none.
    """

    number: int
    at: float
    sender: str
    receiver: str
    kind: str
    fields: str
    cause: int | None
    turn: int | None = None
    forward: bool = False
    ask: int = 0
    links: frozenset[Link] = frozenset()


class Trace(Instrument):
    """The last `limit` messages of the systems that it is attached to."""

    def __init__(self, limit: int = 20_000) -> None:
        self.records: deque[Record] = deque(maxlen=limit)
        self.count = 0
        # by id of the envelope, which exists as long as it is queued
        self._queued: dict[int, Record] = {}
        # those that are open, by id of the envelope
        self._asks: dict[int, tuple[Envelope[Any], Record]] = {}
        self._turns: dict[str, int] = {}
        self._last: dict[str, int] = {}  # the record of each actor's latest turn
        self._current: WeakKeyDictionary[asyncio.Task[Any], tuple[str, int]] = WeakKeyDictionary()
        # the actor that chose the number of an operation reported to another
        self._owners: dict[tuple[str, int], str] = {}

    def attach(self, system: System) -> None:
        """Follow every actor of a system (of an open cache: `cache.system`)."""
        system.supervisor.instruments.add(self)

    def __str__(self) -> str:
        return render(self.records)

    # -- see `Instrument`

    def sent(self, receiver: ActorRef, envelope: Envelope[Any], turn: Turn | None) -> None:
        name, message = receiver.name, envelope.message
        sender, cause = self._sender(name, turn)
        record = self._add(sender, name, type(message).__name__, fields_of(message), cause)
        record.forward = not isinstance(message, Control)
        record.links = frozenset(self._links(sender, name, message))
        self._queued[id(envelope)] = record
        if envelope.reply is not None:
            self._asks[id(envelope)] = envelope, record
            envelope.reply.add_done_callback(lambda reply: self._over(id(envelope), reply))

    def taken(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """An actor takes a message: its next turn."""
        name = receiver.name
        self._turns[name] = turn = self._turns.get(name, 0) + 1
        record = self._queued.pop(id(envelope), None)
        task = asyncio.current_task()
        if record is not None:
            record.turn = turn
            self._last[name] = record.number
            if task is not None:
                self._current[task] = name, record.number

    def dropped(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """A message was dropped with the incarnation it was meant for."""
        self._queued.pop(id(envelope), None)

    def answered(
        self, receiver: ActorRef, envelope: Envelope[Any], value: Any, error: Exception | None
    ) -> None:
        if id(envelope) in self._asks:
            _, ask = self._asks.pop(id(envelope))
            kind, reply = ("answer", value) if error is None else ("refusal", error)
            self._reply(ask, kind, f": {describe(reply)}", ask.receiver, ask.sender)

    def _over(self, key: int, reply: asyncio.Future[Any]) -> None:
        """An ask's future is done. If no actor answered, the deadline passed or the asker gave
        up."""
        if key not in self._asks:
            return
        _, ask = self._asks.pop(key)
        how = "withdrawn" if reply.cancelled() else "expired"
        self._reply(ask, how, "", ask.sender, ask.receiver)

    def _reply(self, ask: Record, how: str, words: str, sender: str, receiver: str) -> None:
        task = asyncio.current_task()
        _, cause = self._current.get(task, ("", None)) if task is not None else ("", None)
        record = self._add(sender, receiver, how, f"#{ask.number} {ask.kind}{words}", cause)
        record.links, record.ask = ask.links, ask.number
        self._in_order(record)

    def _in_order(self, record: Record) -> None:
        """Asks that end at once, with one cause, are listed in the order in which they were asked:
        they may be ended in the order of a set, which is another one in every run."""
        place = len(self.records) - 1
        for index in range(place - 1, -1, -1):
            earlier = self.records[index]
            if earlier.at != record.at:
                return
            if earlier.ask > record.ask and (earlier.kind, earlier.cause) == (
                record.kind,
                record.cause,
            ):
                earlier.number, record.number = record.number, earlier.number
                self.records[index], self.records[place] = record, earlier
                place = index

    # -- inner parts

    def _add(self, sender: str, receiver: str, kind: str, fields: str, cause: int | None) -> Record:
        self.count += 1
        record = Record(self.count, now(), sender, receiver, kind, fields, cause)
        self.records.append(record)
        return record

    def _sender(self, receiver: str, turn: Turn | None) -> tuple[str, int | None]:
        """The name of the sender and the record of the turn that sent: an actor in a turn, a job of
        one, a timer, or a task outside."""
        if turn is not None and (turn.envelope is None or turn.actor.name in self._last):
            name = turn.actor.name
            return name, None if turn.envelope is None else self._last[name]
        task = asyncio.current_task()
        if task is None:
            return f"{receiver}'s timer", None
        known = self._current.get(task)
        if known is not None:
            return known
        if is_job(task):
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
                del self._owners[next(iter(self._owners))]  # the oldest has left the ring too
            yield "op", sender, number
        elif sender.startswith(receiver):  # to itself: about its own operation, or another actor's
            yield "op", self._owners.get((receiver, number), receiver), number
        else:
            yield "op", receiver, number


def minimal(trace: Trace, *, request: str) -> list[Record]:
    """The messages of one request, those of the operations that these messages began, and the
    answers."""
    links: set[Link] = {("request", request)}
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


# -- messages as text, identical in every run


KEYS = frozenset(
    {"hashes", "keys", "parents", "root", "parent", "stored", "evicted", "corrupt", "taken"}
)
"""Fields whose bytes are names of blocks."""

MEASURED = frozenset({"seconds"})
"""Fields that are measured on a real clock, and differ from run to run."""


def describe(message: Any) -> str:
    """A message, or any value that answers an ask, on one line: its type and its fields."""
    if not isinstance(message, Message):
        return value_of(message)
    return f"{type(message).__name__}({fields_of(message)})"


def fields_of(message: Message) -> str:
    """A message's fields, `name=value` with blanks between."""
    shown = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if (
            name in MEASURED
            or value is None
            or value == PLAIN
            or (name in ("memory_generation", "media") and not value)
        ):
            continue
        words = (
            name_of_blocks(value) if name in KEYS and isinstance(value, bytes) else value_of(value)
        )
        shown.append(words if isinstance(value, Message) else f"{name}={words}")
    return " ".join(shown)


def name_of_blocks(keys: bytes) -> str:
    """Names of blocks: how many, and the first one's first digits."""
    count = len(keys) // HASH_BYTES
    return f"{count}:{keys[:4].hex()}" if count else "0"


def value_of(value: Any) -> str:
    """Any other value as text. A value of an unlisted type is shown by its type alone, since a repr
    may hold an address."""
    for kind, words in WORDS:
        if isinstance(value, kind):
            return words(value)
    return f"<{type(value).__name__}>"


def _buffer(value: bytes | bytearray | memoryview) -> str:
    is_table = isinstance(value, memoryview) and value.format == "i"  # a table of blocks
    return _numbers(list(value)) if is_table else f"{len(value)}B"


def _numbers(values: tuple[Any, ...] | list[Any]) -> str:
    if len(values) <= 4:
        return "[" + ",".join(value_of(one) for one in values) + "]"
    return f"[{value_of(values[0])},..{len(values)}]"


WORDS: tuple[tuple[type | tuple[type, ...], Callable[[Any], str]], ...] = (
    (bool, str),
    (Enum, lambda value: str(value.name).lower()),
    (int, str),
    (float, lambda value: f"{value:.4f}"),
    (str, lambda value: value if value.isidentifier() else repr(value)),
    ((bytes, bytearray, memoryview), _buffer),
    (Path, lambda value: f"{value.num_tokens} tokens"),
    (RequestScope, lambda value: f"{value.lora}/{value.salt}"),
    ((tuple, list), _numbers),
    (Message, describe),
    (BaseException, lambda value: f"{type(value).__name__}: {value}"),
    (msgspec.Struct, lambda value: type(value).__name__),
    (type(None), str),
)
