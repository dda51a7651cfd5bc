"""Recording of an engine's requests from its KV events, as a trace: `kvactors record`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvactors.errors import ConfigError
from kvactors.scenario.output import Output, live_line, to_stdout
from kvactors.scenario.trace_recording import ArrivalOrder, TracedRequest, TraceFile
from kvactors.signals import signals_noted
from kvactors.zmq_endpoint import Endpoint

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


class EventRequests:
    """Requests of an engine as its KV events show them: pure state.

    An event has blocks that were computed (or loaded) because the device did not have them, and
    their parent. The path above them was on the device. Blocks that continue a path within GAP_S
    are of the same request: single ones are its output, several the next part of its prompt.

    Attributes:
        order: the requests.
        block_size: tokens of a block, 0 before the first event.
        requests: number of requests.
        stored: blocks stored on the device.
        repeated: blocks of `stored` that had been stored before.
        unknown_parents: blocks whose own path was published before the recording, or is lost.
        left_out: events about other KV cache groups.
        lost: batches that are missing in the sequence.
    """

    def __init__(self) -> None:
        self.order = ArrivalOrder()
        self.block_size = 0
        self.requests = self.stored = self.repeated = 0
        self.unknown_parents = self.left_out = self.lost = 0
        self._parents: dict[int, int | None] = {}
        self._open: dict[int, TracedRequest] = {}  # by their last block, in the order of `last`
        self._expected: dict[bytes, int] = {}  # by topic: the next number
        self._first = self._now = -math.inf

    @property
    def full(self) -> bool:
        """Whether there are MAX_BLOCKS."""
        return len(self._parents) >= MAX_BLOCKS

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
            request = TracedRequest(self._now - self._first, 0)
            self.order.add(request, 0)
            self._set_prompt(request, hashes[-1])
        elif len(hashes) == 1 or request.output_length:
            request.output_length += len(hashes) * self.block_size
        else:
            self._set_prompt(request, hashes[-1])
        request.last = self._now
        if (other := self._open.pop(hashes[-1], None)) is not None:
            other.ended = True
        self._open[hashes[-1]] = request

    def _set_prompt(self, request: TracedRequest, last: int) -> None:
        """The prompt reaches from the start of the sequence to a block."""
        path, above = [last], self._parents[last]
        while above is not None:
            path.append(above)
            above = self._parents[above]
        self.order.grow(request, len(path) - request.input_length // self.block_size)
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


def record_events(
    endpoint: str,
    path: Path,
    *,
    topic: str = "",
    seconds: float = math.inf,
    progress: Callable[[int], None] = lambda _: None,
) -> EventRequests:
    """Record the requests of an engine from its KV events, until SIGINT, SIGTERM or `seconds`.

    Args:
        endpoint: where the engine publishes.
        path: of the file. One of that name is replaced.
        topic: prefix of the topics.
        seconds: length of the recording.
        progress: called with the number of requests.

    Raises:
        ConfigError: the endpoint is not valid, or publishes something else.
        OSError: the file cannot be written.
    """
    try:
        import zmq
    except ImportError as error:
        raise ConfigError("KV events need ZMQ: pip install 'kvactors[kv-events]'") from error
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")
    found, signals = EventRequests(), list[int]()
    until = time.monotonic() + seconds
    with zmq.Context() as context, context.socket(zmq.SUB) as socket, signals_noted(signals):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUED_BATCHES)
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        try:
            socket.setsockopt(zmq.IPV6, int(Endpoint.of(endpoint).ipv6))
            socket.connect(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            raise ConfigError(f"endpoint {endpoint}: {error}") from error
        with closing(TraceFile(path)) as file:
            try:
                while not signals and not found.full and (left := until - time.monotonic()) > 0:
                    if not socket.poll(int(1000 * min(left, POLL_S))):
                        continue
                    has_header = found.block_size
                    found.message(socket.recv_multipart())
                    if found.block_size and not has_header:
                        file.header(endpoint, found.block_size)
                    file.requests(found.order.take())
                    progress(found.requests)
            finally:
                file.requests(found.order.take(every=True))
    return found


def record(endpoint: str, *, out: Output, topic: str = "", seconds: float = math.inf) -> int:
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
    with live_line() as show:
        found = record_events(
            endpoint,
            out,
            topic=topic,
            seconds=seconds,
            progress=lambda requests: show(f"{requests:,} requests", requests),
        )
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
