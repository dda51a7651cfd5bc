"""Operations of a cache as intervals: acquires, waits for loads, loads, offloads, saves, copies,
reads and writes of the store, and deliveries to sinks.

`OperationWatch` finds the beginning and the end of each in the messages between the actors, for
metrics, traces and spans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvactors.actor import Actor, ActorRef, Envelope, Instrument, Turn
from kvactors.actor.clock import now
from kvactors.cpu_evictor import messages as host
from kvactors.data_plane.base import Direction
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.messages import Delivered
from kvactors.gpu_swapper.messages import CopyFinished
from kvactors.prefix_index import messages as index
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.storage import messages as storage
from kvactors.system import System
from kvactors.types import HASH_BYTES

MOST_OPEN = 100_000  # operations in flight that are followed: beyond them all are forgotten

Key = tuple[Any, ...]


class Operation(NamedTuple):
    """An operation that has ended. Times are of the loop's clock.

    Attributes:
        kind: acquire, ready, request, load, offload, save, copy, read, write or flush.
        where: the actor that carried it out, or the sink.
        number: of the lease, the operation or the call.
        tier: of acquire: `none`, `device`, or `pending` while blocks are being loaded. Of ready and
            load: the lowest tier that blocks came from. Of copy: `host` or `device`, the target.
        ok: it was not refused and did not fail as a whole.
        granted: of the first ready after an acquire with pending blocks, the end of the acquire.
            None of others.
    """

    kind: str
    where: str
    number: int
    began: float
    ended: float
    tier: str = ""
    blocks: int = 0
    ok: bool = True
    request: str = ""
    granted: float | None = None


BEGINNINGS: Mapping[type[Any], tuple[str, Callable[[Any], int]]] = {
    host.Load: ("load", lambda m: len(m.hashes) // HASH_BYTES - m.start),
    host.Offload: ("offload", lambda m: len(m.blocks)),
    host.Save: ("save", lambda m: len(m.save)),
}
"""Requests of PrefixIndex: kind and blocks."""

BATCHES: Mapping[type[Any], str] = {
    storage.Read: "read",
    storage.FetchDevice: "read",
    storage.Write: "write",
    storage.SaveDevice: "write",
}
"""Requests to actors of the store, of which there may be several."""

ANSWERS: Mapping[type[Any], tuple[str, Callable[[Any], tuple[str, int, bool]]]] = {
    host.Loaded: ("load", lambda m: (_lowest(m), m.num_loaded, m.num_loaded > 0)),
    host.Offloaded: ("offload", lambda m: ("", len(m.kept_mask) - m.kept_mask.count(0), True)),
    host.Saved: ("save", lambda _: ("", -1, True)),
}
"""Answers to PrefixIndex: kind, tier, blocks (-1: those of the request) and success."""

BATCH_ANSWERS: Mapping[type[Any], tuple[str, Callable[[Any], tuple[int, bool]]]] = {
    storage.ReadDone: ("read", lambda m: _of_outcomes(m.outcomes)),
    storage.Written: ("write", lambda m: _of_outcomes(m.outcomes)),
    storage.DeviceFetched: ("read", lambda m: (m.num_blocks, m.num_blocks > 0)),
    storage.DeviceSaved: ("write", lambda m: (m.num_blocks, m.num_blocks > 0)),
}
"""Answers of the store's actors: kind, blocks and success."""


def _lowest(message: host.Loaded) -> str:
    if not message.num_loaded:
        return "none"
    return "storage" if message.num_loaded > message.from_host else "host"


def _of_outcomes(outcomes: bytes) -> tuple[int, bool]:
    good = outcomes.count(storage.Outcome.OK)
    return good, good > 0 or storage.Outcome.EXISTS in outcomes


class OperationWatch(Instrument):
    """Finds the operations of one system. index_started: called with each incarnation of
    PrefixIndex, the present one included."""

    def __init__(
        self,
        operation: Callable[[Operation], None],
        index_started: Callable[[PrefixIndex], None] | None = None,
    ) -> None:
        self._operation = operation
        self._index_started = index_started
        self._open: dict[Key, tuple[float, int]] = {}  # start, and blocks
        # by lease: start, id, and the end of an acquire whose blocks are pending
        self._requests: dict[int, tuple[float, str, float | None]] = {}
        self._notifier: FlushNotifier | None = None

    def attach(self, system: System) -> None:
        self._notice(system.notifier_actor)
        self._notice(system.index_actor)
        system.supervisor.instruments.add(self)

    def detach(self, system: System) -> None:
        system.supervisor.instruments.remove(self)

    # -- see `Instrument`

    def sent(self, receiver: ActorRef, envelope: Envelope[Any], turn: Turn | None) -> None:
        message: Any = envelope.message
        kind = type(message)
        if envelope.reply is not None:
            self._asked(message, envelope.reply)
        elif kind in BEGINNINGS:
            name, blocks = BEGINNINGS[kind]
            self._begin((name, message.op), blocks(message))
        elif kind in ANSWERS:
            name, result = ANSWERS[kind]
            tier, moved, ok = result(message)
            self._end((name, message.op), "cpu_evictor", tier, moved, ok)
        elif kind in BATCHES:
            self._begin((BATCHES[kind], receiver.name, message.op), 0)
        elif kind in BATCH_ANSWERS and turn is not None:
            name, counts = BATCH_ANSWERS[kind]
            where = turn.actor.name
            self._end((name, where, message.op), where, "storage", *counts(message))
        elif kind is CopyFinished and message.direction is not Direction.WITHIN:
            self._copied(receiver.name, message)
        elif kind is host.Cancel:
            self._open.pop(("load", message.op), None)
        elif kind is index.Abandon:
            self._request_over(message.lease)

    def taken(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        message = envelope.message
        if isinstance(message, Delivered) and self._notifier is not None:
            self._delivered(message, self._notifier)

    def failed(self, actor: ActorRef, error: BaseException) -> None:
        """Operations in flight may never end."""
        self._open = {key: begun for key, begun in self._open.items() if key[0] == "acquire"}
        if actor.role == PrefixIndex.ROLE:
            self._requests.clear()

    def started(self, actor: Actor) -> None:
        self._notice(actor)

    # -- inner parts

    def _notice(self, actor: Actor) -> None:
        if isinstance(actor, FlushNotifier):
            self._notifier = actor
        elif isinstance(actor, PrefixIndex) and self._index_started is not None:
            self._index_started(actor)

    def _begin(self, key: Key, blocks: int) -> None:
        if len(self._open) >= MOST_OPEN:
            self._open.clear()
        self._open[key] = now(), blocks

    def _end(
        self, key: Key, where: str, tier: str, blocks: int, ok: bool, request: str = ""
    ) -> None:
        begun = self._open.pop(key, None)
        if begun is not None:
            moved = begun[1] if blocks < 0 else blocks
            times = begun[0], now()
            self._operation(Operation(key[0], where, key[-1], *times, tier, moved, ok, request))

    def _asked(self, message: Any, reply: asyncio.Future[Any]) -> None:
        if isinstance(message, index.Acquire):
            self._begin(("acquire", message.lease), 0)
            lease, request = message.lease, message.request_id
            reply.add_done_callback(lambda reply: self._acquired(lease, request, reply))
        elif isinstance(message, index.Ready):
            lease = message.lease
            reply.add_done_callback(lambda reply: self._waited(lease, reply))
        elif isinstance(message, (index.Finish, index.Preempt)):
            lease = message.lease
            reply.add_done_callback(lambda _: self._request_over(lease))

    def _acquired(self, lease: int, request: str, reply: asyncio.Future[Any]) -> None:
        granted = result_of(reply)
        tier, blocks = "none", 0
        if isinstance(granted, index.AcquireResult):
            blocks = granted.device_hits
            tier = "pending" if granted.pending else "device" if blocks else "none"
        key: Key = ("acquire", lease)
        began = self._open.get(key, (now(), 0))[0]
        self._end(key, PrefixIndex.ROLE, tier, blocks, granted is not None, request)
        if isinstance(granted, index.AcquireResult) and len(self._requests) < MOST_OPEN:
            self._requests[lease] = began, request, now() if granted.pending else None
            if not granted.pending:
                self._ready(lease, tier, blocks)

    def _waited(self, lease: int, reply: asyncio.Future[Any]) -> None:
        result = result_of(reply)
        if isinstance(result, index.ReadyResult) and lease in self._requests:
            lower = "storage" if result.storage_hits else "host" if result.host_hits else ""
            tier = lower or ("device" if result.device_hits else "none")
            blocks = result.storage_hits + result.host_hits + result.device_hits
            self._ready(lease, tier, blocks)

    def _ready(self, lease: int, tier: str, blocks: int) -> None:
        began, request, granted = self._requests[lease]
        self._requests[lease] = began, request, None
        times = began, now()
        self._operation(
            Operation("ready", PrefixIndex.ROLE, lease, *times, tier, blocks, granted=granted)
        )

    def _request_over(self, lease: int) -> None:
        known = self._requests.pop(lease, None)
        if known is not None:
            began, request, _ = known
            done = Operation("request", PrefixIndex.ROLE, lease, began, now(), request=request)
            self._operation(done)

    def _copied(self, where: str, message: CopyFinished) -> None:
        ended, moved = now(), message.pairs - len(message.failed)
        tier = "host" if message.direction is Direction.TO_HOST else "device"
        began = ended - message.seconds
        self._operation(Operation("copy", where, message.op, began, ended, tier, moved, moved > 0))

    def _delivered(self, message: Delivered, notifier: FlushNotifier) -> None:
        delivery = notifier.sinks[message.sink]
        if not delivery.is_current(message.number):
            return
        blocks = sum(task.count for task in delivery.batch.tasks)
        ended = now()
        began = ended if delivery.since is None else delivery.since
        ok = not message.error
        done = Operation("flush", message.sink, message.number, began, ended, "", blocks, ok)
        self._operation(done)


def result_of(reply: asyncio.Future[Any]) -> Any:
    """The result of a future that is done, None if it has none."""
    return None if reply.cancelled() or reply.exception() is not None else reply.result()
