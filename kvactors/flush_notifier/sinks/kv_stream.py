"""Streams of numbered batches: the events with their replay window and their state, and the details
beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import SnapshotSource
from kvactors.flush_notifier.sinks.kv_encoder import KvEventEncoder
from kvactors.flush_notifier.sinks.kv_replay import Window
from kvactors.flush_notifier.sinks.kv_sockets import Send
from kvactors.flush_notifier.sinks.kv_state import StateMaker, StreamChanges, StreamState
from kvactors.flush_notifier.sinks.kv_wire import encode_batch
from kvactors.sink_config import KvEventsSinkConfig


class EventStream:
    """The batches of a publisher: numbered, sent, kept for replay, and summed up as states.

    Attributes:
        sequence: number of the next batch.
        first: number of this process's first batch.
        fill: whether readers insist on every number.
        window: the last batches.
        states: made of the view and the batches.
        source: of the view.
        sender: sends a message to the readers. Set when the socket is open.
    """

    def __init__(self, config: KvEventsSinkConfig, encoder: KvEventEncoder, first: int) -> None:
        self.first = self.sequence = first
        self.fill = config.numbers == "from_zero"
        self.topic = config.topic.encode()
        self.window = Window(config.replay_window, config.replay_bytes)
        self.epoch = 0
        self.source: SnapshotSource = _no_blocks
        self.sender: Send = _not_open
        self.states = StateMaker(
            self._begin_state, self._end_state, lambda: self.source, self._kept, encoder
        )
        self._dp_rank = config.dp_rank
        self._encode = encoder.batch
        # published by the last call: may not be in the ledger's view of the sink yet
        self._last: Sequence[FlushTask] = ()
        self._call: Sequence[FlushTask] | None = None  # tasks of the call in progress
        self._call_from = first  # number of that call's first batch
        self._changes: list[StreamChanges] = []  # of the states in progress
        self._readers = 0

    def publish(self, events: list[bytes]) -> None:
        """Send one batch of encoded events."""
        self._send(self._encode(time.time(), events))

    def _send(self, payload: bytes) -> None:
        number = self.sequence
        self.window.add(number, payload)
        self.sender(self.topic, number, payload)
        self.sequence = number + 1

    # -- calls

    def begin_call(self, tasks: Sequence[FlushTask]) -> None:
        """Tasks are about to be published."""
        self._call, self._call_from = tasks, self.sequence
        self._keep()
        for changes in self._changes:
            changes.note(tasks)

    def end_call(self, published: Sequence[FlushTask]) -> None:
        """The tasks of the call that were published."""
        self._last, self._call = published, None
        self._keep()

    def publish_call(self, tasks: Sequence[FlushTask], payload: bytes) -> None:
        """Send the batch of a call that needs no other: `begin_call`, `publish` and `end_call` in
        one."""
        for changes in self._changes:
            changes.note(tasks)
        self._last = ()
        self._send(payload)
        self._last = tasks

    @property
    def published_in_call(self) -> bool:
        """Whether the call in progress has published a batch."""
        return self.sequence != self._call_from

    def _keep(self) -> None:
        """The window must keep the batches of the call in progress, and those after a state that
        readers are sent."""
        number = self.states.number
        self.window.needed = number if self._call is None else min(number, self._call_from)

    # -- the state

    def _begin_state(self) -> tuple[int, StreamChanges]:
        if self._call is None:
            number, changes = self.sequence, StreamChanges(self._last)
        else:  # the tasks of the call before this one are in the view
            number, changes = self._call_from, StreamChanges(())
            changes.note(self._call)
        self._changes.append(changes)
        self.states.number = number
        self._keep()
        return number, changes

    def _end_state(self, changes: StreamChanges) -> None:
        self._changes.remove(changes)

    def _kept(self, number: int) -> bool:
        return number >= self.window.first or number == self.sequence

    async def state(self) -> StreamState:
        """The state at a number from which on every batch is kept."""
        return await self.states.state()

    def hold(self) -> None:
        """A reader is being answered: a state made for it is kept."""
        self._readers += 1

    def release(self) -> None:
        """One reader less. Without readers the window keeps no more than configured."""
        self._readers -= 1
        if not self._readers:
            self.states.release()
            self._keep()

    def payloads(self, state: StreamState, most: int) -> Iterator[bytes]:
        """A state as at most `most` batches."""
        return state.payloads(most, self._dp_rank)

    def empty(self) -> bytes:
        """The payload of a batch without events."""
        return self._encode(time.time(), [])

    async def snapshot(self) -> AsyncIterator[bytes]:
        """Parts of a snapshot, each a payload of one record. A reader discards its state, applies
        every part, then every batch from `next_sequence` on."""
        state = await self.state()
        number = 0
        for events in state.stored():
            yield self._part(state.number, number, events, last=False)
            number += 1
            await asyncio.sleep(0)
        yield self._part(state.number, number, [], last=True)

    def _part(self, next_sequence: int, number: int, events: Any, *, last: bool) -> bytes:
        record = {
            "type": "Snapshot",
            "epoch": self.epoch,
            "next_sequence": next_sequence,
            "part": number,
            "last": last,
            "events": events,
        }
        return encode_batch(time.time(), [record], self._dp_rank)


class DetailStream:
    """The second stream: epochs, reasons and snapshots, for readers of kvactors. Off without a
    topic.

    Attributes:
        sender: sends a message to the readers. Set when the socket is open.
    """

    def __init__(self, config: KvEventsSinkConfig, first: int) -> None:
        self.topic = config.detail_topic.encode()
        self.sequence = first
        self.sender: Send = _not_open
        self._dp_rank = config.dp_rank

    def publish(self, record: dict[str, Any]) -> None:
        """Send one record."""
        if self.topic:
            self.send(encode_batch(time.time(), [record], self._dp_rank))

    def send(self, payload: bytes) -> None:
        """Send one encoded batch."""
        self.sender(self.topic, self.sequence, payload)
        self.sequence += 1


def _no_blocks(**_: bool) -> Iterator[Any]:
    """The view of a sink without a notifier."""
    return iter(())


def _not_open(*_: object) -> None:
    raise SinkError("the sink is not open")
