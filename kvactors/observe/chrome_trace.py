"""Traces for Perfetto and chrome://tracing: the Trace Event Format (JSON object form).

One track for each actor has its turns, with flow arrows from the turn that sent a message to the
turn that handled it. Copies, I/O of the store and deliveries to sinks are slices on tracks of their
kind. Each request is a slice, the parent of its acquire and of its loading.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvactors.actor import ActorRef, Envelope, Instrument, Turn
from kvactors.actor.clock import now
from kvactors.observe import OpenCache
from kvactors.observe.operations import Operation, OperationWatch

MOST_EVENTS = 1_000_000  # of a trace: later ones are counted only
ACTORS, CALLERS = 1, 0  # process of every track, and the track of messages from outside

Event = dict[str, Any]


class ChromeTrace(Instrument):
    """Records the messages and operations of the systems that it observes."""

    def __init__(self, limit: int = MOST_EVENTS) -> None:
        self.left_out = 0
        self._limit = limit
        self._events: list[Event] = []
        self._tracks: dict[str, int] = {}
        self._flows: dict[int, int] = {}  # by id of the envelope, which exists while it is queued
        self._count = 0
        self._turn: tuple[str, str, float, dict[str, int]] | None = None
        self._watch = OperationWatch(self._operation)

    @asynccontextmanager
    async def observing(self, cache: OpenCache) -> AsyncIterator[ChromeTrace]:
        instruments = cache.system.supervisor.instruments
        self._watch.attach(cache.system)
        instruments.add(self)
        try:
            yield self
        finally:
            instruments.remove(self)
            self._watch.detach(cache.system)

    def events(self) -> list[Event]:
        named = [
            _metadata("process_name", 0, "kvactors"),
            _metadata("thread_name", CALLERS, "callers"),
            *(_metadata("thread_name", track, name) for name, track in self._tracks.items()),
        ]
        return [*named, *sorted(self._events, key=_order)]

    def encode(self) -> bytes:
        page = {
            "traceEvents": self.events(),
            "displayTimeUnit": "ms",
            "otherData": {"left_out": self.left_out},
        }
        return msgspec.json.encode(page)

    def write(self, path: str | Path) -> None:
        Path(path).write_bytes(self.encode())

    # -- see `Instrument`

    def sent(self, receiver: ActorRef, envelope: Envelope[Any], turn: Turn | None) -> None:
        self._count += 1
        self._flows[id(envelope)] = self._count
        at = _us(now())
        kind = type(envelope.message).__name__
        track = CALLERS
        if turn is not None and self._turn is not None:
            track = self._track(turn.actor.name)
        else:  # an arrow begins in a slice
            self._add({"ph": "X", "name": kind, "ts": at, "dur": 0, "tid": CALLERS, "cat": "call"})
        self._add(
            {"ph": "s", "name": kind, "ts": at, "tid": track, "cat": "message", "id": self._count}
        )

    def dropped(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        self._flows.pop(id(envelope), None)

    def taken(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        at, message = now(), envelope.message
        numbers = {
            name: value
            for name in ("lease", "op")
            if isinstance(value := getattr(message, name, None), int)
        }
        self._turn = (receiver.name, type(message).__name__, at, numbers)
        number = self._flows.pop(id(envelope), None)
        if number is not None:
            arrow = {"ph": "f", "bp": "e", "name": self._turn[1], "ts": _us(at)}
            self._add({**arrow, "tid": self._track(receiver.name), "cat": "message", "id": number})

    def finished(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        self._end_turn()

    def failed(self, actor: ActorRef, error: BaseException) -> None:
        self._end_turn()
        at, track = _us(now()), self._track(actor.name)
        name = f"failed: {type(error).__name__}"
        self._add({"ph": "i", "name": name, "ts": at, "tid": track, "cat": "failure", "s": "t"})

    # -- inner parts

    def _end_turn(self) -> None:
        if self._turn is None:
            return
        (name, kind, began, numbers), self._turn = self._turn, None
        slice_ = {"ph": "X", "name": kind, "ts": _us(began), "dur": _us(now()) - _us(began)}
        self._add({**slice_, "tid": self._track(name), "cat": "turn", "args": numbers})

    def _operation(self, done: Operation) -> None:
        args: dict[str, Any] = {"blocks": done.blocks, "ok": done.ok}
        if done.tier:
            args["tier"] = done.tier
        name, category, number = done.kind, "request", done.number
        began: float | None = done.began
        if done.kind == "request":
            name, args = f"request {done.request}", {}
        elif done.kind == "ready":
            name, began = "load", done.granted
        elif done.kind != "acquire":
            self._count += 1
            names = {"copy": f"copy to {done.tier}", "flush": f"flush {done.where}"}
            name, category, number = names.get(name, name), name, self._count
        if (done.ok or done.kind != "acquire") and began is not None:
            shared = {"name": name, "cat": category, "id": f"0x{number:x}", "tid": CALLERS}
            begin = {"ph": "b", "ts": _us(began), "args": args, **shared}
            self._add(begin, {"ph": "e", "ts": _us(done.ended), **shared})

    def _add(self, *events: Event) -> None:
        """Add all events or none: each end needs its beginning."""
        if len(self._events) + len(events) > self._limit:
            self.left_out += len(events)
            return
        self._events += [{**event, "pid": ACTORS} for event in events]

    def _track(self, name: str) -> int:
        return self._tracks.setdefault(name, len(self._tracks) + 1)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _order(event: Event) -> tuple[int, int]:
    """Events by time. At one time a request encloses its acquire, and its load comes after that."""
    first, rank = event["name"].split(" ")[0], 1
    if first == "request":
        rank = 0 if event["ph"] == "b" else 3
    elif first == "load":
        rank = 2
    return event["ts"], rank


def _metadata(name: str, track: int, value: str) -> Event:
    return {"ph": "M", "name": name, "pid": ACTORS, "tid": track, "args": {"name": value}}
