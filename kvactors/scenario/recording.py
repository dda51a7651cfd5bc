"""`kvactors record`: a trace of an engine's requests, from the KV events that it publishes, for
`kvactors sweep` and `kvactors replay`.

A trace has times, lengths and block ids, and no tokens. The id of a block is the last 8 bytes of
its hash, as in KV events."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.errors import ConfigError
from kvactors.files import open_private
from kvactors.scenario.output import Output, live_line, need, to_stdout
from kvactors.settings.sinks import Endpoint
from kvactors.signals import signals_noted

MAX_WAITING = 4_000
"""Requests that wait for earlier ones to end: lines are in the order of arrival."""

GAP_S = 2.0
"""Seconds within which blocks that continue a path belong to the same request."""

MAX_BLOCKS = 1 << 22
"""Distinct blocks of a recording, of about 130 bytes each."""

POLL_S = 0.2
"""Seconds between two looks at signals and the time."""

QUEUED_BATCHES = 100_000
"""Batches of events that wait in ZMQ's queue."""

ARRAY = (
    *("type", "block_hashes", "parent_block_hash", "token_ids"),
    *("block_size", "lora_id", "medium", "lora_name"),
)
"""Fields of a BlockStored event in the array dialect, in their order."""


class EventRequest(msgspec.Struct, eq=False):
    """A request of the trace. ids: of the prompt's blocks. last: time of its last event. ended:
    nothing can follow."""

    at: float
    input_length: int = 0
    output_length: int = 0
    ids: NDArray[np.uint64] = np.empty(0, np.uint64)
    last: float = 0.0
    ended: bool = False

    def line(self) -> dict[str, Any]:
        """The request as a line of the trace."""
        return {
            "timestamp": round(1000 * self.at),
            "input_length": self.input_length,
            "output_length": self.output_length,
            "hash_ids": self.ids.tolist(),
        }


class EventRequests:
    """Requests of an engine as its KV events show them: pure state.

    An event has blocks that were computed (or loaded) because the device did not have them, and
    their parent. The path above them was on the device. Blocks that continue a path within GAP_S
    are of the same request: single ones are its output, several the next part of its prompt.

    Attributes:
        block_size: tokens of a block, 0 before the first event.
        repeated: blocks of `stored` that had been stored before.
        unknown_parents: blocks whose own path was published before the recording, or is lost.
        lost: batches that are missing in the sequence.
    """

    def __init__(self) -> None:
        self.block_size = 0
        self.requests = self.stored = self.repeated = 0
        self.unknown_parents = self.left_out = self.lost = 0
        self._parents: dict[int, int | None] = {}
        self._waiting: deque[EventRequest] = deque()  # in the order of their arrival
        self._open: dict[int, EventRequest] = {}  # by their last block, in the order of `last`
        self._expected: dict[bytes, int] = {}  # by topic: the next number
        self._first = self._now = -math.inf

    @property
    def full(self) -> bool:
        return len(self._parents) >= MAX_BLOCKS

    def take(self, *, every: bool = False) -> list[dict[str, Any]]:
        """The lines of the first requests, up to the first that has not ended. That one is taken
        too if MAX_WAITING wait, and all are with `every`."""
        waiting, taken = self._waiting, []
        while waiting and (every or waiting[0].ended or len(waiting) > MAX_WAITING):
            taken.append(waiting.popleft().line())
        return taken

    def message(self, frames: Sequence[bytes]) -> None:
        """Apply a message. ConfigError if it has no KV events."""
        try:
            topic, number, payload = frames
            timestamp, events, *_ = msgspec.msgpack.decode(payload)
            self._batch(float(timestamp), [as_map(event) for event in events])
        except (msgspec.DecodeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(
                "the endpoint does not publish KV events as vLLM, SGLang and kvactors do: "
                f"{type(error).__name__}: {error}"
            ) from error
        sequence = int.from_bytes(number, "big")
        self.lost += max(0, sequence - self._expected.get(topic, sequence))
        self._expected[topic] = sequence + 1

    def _batch(self, timestamp: float, events: Iterable[dict[str, Any]]) -> None:
        self._now = max(self._now, timestamp)
        self._end_before(self._now - GAP_S)
        runs: dict[int, tuple[int | None, list[int]]] = {}  # by their last block
        for event in events:
            if event["type"] != "BlockStored" or event.get("medium") not in ("GPU", None):
                continue
            self.block_size = self.block_size or int(event["block_size"])
            if event.get("group_idx") or event["block_size"] != self.block_size:
                self.left_out += 1
                continue
            parent = event["parent_block_hash"]
            above = None if parent is None else as_id(parent)
            # SGLang publishes a path as events of one block each.
            first, hashes = runs.pop(above, (above, [])) if above is not None else (None, [])
            hashes.extend(as_id(one) for one in event["block_hashes"])
            if hashes:
                runs[hashes[-1]] = first, hashes
        for first, hashes in runs.values():
            self._stored(first, hashes)

    def _end_before(self, limit: float) -> None:
        for block, request in list(self._open.items()):
            if request.last >= limit:
                return
            request.ended = True
            del self._open[block]

    def _stored(self, parent: int | None, hashes: Sequence[int]) -> None:
        request = None if parent is None else self._open.pop(parent, None)
        if parent is not None and parent not in self._parents:
            self.unknown_parents += 1
            self._parents[parent] = None
        for block in hashes:
            self.repeated += block in self._parents
            # The first parent stays, so that every block has one parent.
            self._parents.setdefault(block, parent)
            parent = block
        self.stored += len(hashes)
        if request is None:
            if not self.requests:
                self._first = self._now
            self.requests += 1
            request = EventRequest(self._now - self._first)
            self._waiting.append(request)
            self._set_prompt(request, hashes[-1])
        elif len(hashes) == 1 or request.output_length:
            request.output_length += len(hashes) * self.block_size
        else:
            self._set_prompt(request, hashes[-1])
        request.last = self._now
        if (other := self._open.pop(hashes[-1], None)) is not None:
            other.ended = True
        self._open[hashes[-1]] = request

    def _set_prompt(self, request: EventRequest, last: int) -> None:
        """The prompt reaches from the start of the sequence to a block."""
        path, above = [last], self._parents[last]
        while above is not None:
            path.append(above)
            above = self._parents[above]
        request.ids = np.array(path[::-1], np.uint64)
        request.input_length = len(path) * self.block_size


def as_map(event: Any) -> dict[str, Any]:
    """An event of either dialect as a map. TypeError or KeyError for anything else."""
    found = event if isinstance(event, dict) else dict(zip(ARRAY, event, strict=False))
    if not isinstance(found["type"], str):
        raise TypeError("an event without its type")
    return found


def as_id(block_hash: int | bytes) -> int:
    """The id of a block: the last 8 bytes of its hash as an unsigned number."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & ((1 << 64) - 1)


@contextmanager
def trace_file(path: str | os.PathLike[str]) -> Iterator[Callable[[Iterable[Any]], None]]:
    """A new file of JSON lines, for its user alone (0600): who has the tokens of a prompt can find
    out whether the trace has it. Yields the function that appends lines. OSError if they cannot be
    written: the file ends with a whole line then."""
    fd = open_private(os.fspath(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)

    def append(lines: Iterable[Any]) -> None:
        size, rest = os.fstat(fd).st_size, memoryview(msgspec.json.Encoder().encode_lines(lines))
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            os.ftruncate(fd, size)
            raise

    try:
        yield append
    finally:
        os.close(fd)


def record_command(
    endpoint: str, *, out: Output, topic: str = "", seconds: float = math.inf
) -> int:
    """Record the requests of an engine as a trace for `sweep` and `replay`, from the KV events that
    it publishes, until Ctrl-C or SIGTERM. Needs the extra [kv-events]. The exit status is 1 if
    there were none.

    Parameters
    ----------
    endpoint
        Where the engine publishes, such as tcp://127.0.0.1:5557.
    out
        Where to write the trace: JSON lines.
    topic
        Prefix of the topics of the events.
    seconds
        Length of the recording.
    """
    if to_stdout(out):
        raise ConfigError("--out must be a file")
    need("zmq", "KV events need ZMQ", "kv-events")
    import zmq

    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")
    found, signals = EventRequests(), list[int]()
    until = time.monotonic() + seconds
    with (
        live_line() as show,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
        signals_noted(signals),
    ):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUED_BATCHES)
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        try:
            socket.setsockopt(zmq.IPV6, int(Endpoint.of(endpoint).ipv6))
            socket.connect(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            raise ConfigError(f"endpoint {endpoint}: {error}") from error
        with trace_file(out) as append:
            while not signals and not found.full and (left := until - time.monotonic()) > 0:
                if not socket.poll(int(1000 * min(left, POLL_S))):
                    continue
                is_first = not found.block_size
                try:
                    found.message(socket.recv_multipart())
                except ConfigError:
                    if not is_first:  # the requests before this message, after their header
                        append(found.take(every=True))
                    raise
                if is_first and found.block_size:
                    append([{"header": {"source": endpoint, "block_size": found.block_size}}])
                append(found.take())
                show(f"{found.requests:,} requests", found.requests)
            append(found.take(every=True))
    if not found.requests:
        print(f"{endpoint} published no block that was stored on a device", file=sys.stderr)
        return 1
    again = f"{found.repeated:,} ({found.repeated / found.stored:.1%})"
    print(f"{found.requests:,} requests in {out}")
    print(f"{found.stored:,} blocks stored on the device, {again} of them a second time or later")
    for count, text in (
        (found.unknown_parents, "paths begin at a block that was stored before the recording"),
        (found.lost, "batches were lost: record with less load on this machine"),
        (found.left_out, "events of other KV cache groups were left out"),
        (MAX_BLOCKS * found.full, "distinct blocks: the recording has ended"),
    ):
        if count:
            print(f"{count:,} {text}", file=sys.stderr)
    return 0
