"""Recording of requests as a trace, for `kvactors sweep` and `kvactors replay`: those of an open
cache, or those of an engine from its KV events.

A trace has times, lengths and block ids, and no tokens. The id of a block is the last 8 bytes of
its hash, as in KV events."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.actor import ActorRef, Envelope, Instrument, Turn
from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.cache import KVCache
from kvactors.checks import kind
from kvactors.errors import ConfigError
from kvactors.files import open_private
from kvactors.native import Path
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Abandon, Acquire, AcquireResult, Finish, Preempt
from kvactors.scenario.output import Output, live_line, need, to_stdout
from kvactors.settings.sinks import Endpoint
from kvactors.signals import signals_noted
from kvactors.threads import Workers, in_thread

log = get_logger()

HELD_BYTES = 1 << 25
"""Bytes of requests that wait for earlier ones to end. Twice as many wait for the file."""

REQUEST_BYTES = 512
"""Bytes of a request that waits, without its ids."""

ENCODER = msgspec.json.Encoder()

CLOSE_S = 10.0
"""Seconds that the end of a recording waits for the file."""


class TracedRequest(msgspec.Struct, eq=False):
    """A request of the trace. size: bytes that the request holds while it waits. ids: of the
    prompt's blocks, None while a lease has them. ended: the request is complete, or was refused
    (then without ids)."""

    at: float
    input_length: int
    size: int = REQUEST_BYTES
    output_length: int = 0
    ids: NDArray[np.uint64] | None = None
    ended: bool = False
    path: Path | None = None
    request_id: str = ""
    granted: bool = False
    last: float = 0.0

    def capture(self) -> None:
        """Take the ids and lengths from the lease's path. Blocks that an earlier lease of the
        request had stay."""
        path, self.path = self.path, None
        if path is None:
            return
        if self.ids is None:
            self.input_length = min(self.input_length, path.num_tokens)
            hashes = path.hashes(0, self.input_length // path.block_size)
            self.ids = np.frombuffer(hashes, ">u8")[3::4].astype(np.uint64)
        self.output_length = max(self.output_length, path.num_tokens - self.input_length)


class ArrivalOrder:
    """Requests in the order of their arrival, from their arrival until they are written."""

    def __init__(self) -> None:
        self._waiting: deque[TracedRequest] = deque()
        self._held = 0

    def add(self, request: TracedRequest, blocks: int) -> None:
        self._waiting.append(request)
        self.grow(request, blocks)
        self._held += REQUEST_BYTES

    def grow(self, request: TracedRequest, blocks: int) -> None:
        request.size += 8 * blocks
        self._held += 8 * blocks

    def take(self, *, every: bool = False) -> list[TracedRequest]:
        """The first requests, up to the first that has not ended. That one is taken too if those
        behind it take HELD_BYTES, and all are with `every`. Requests that wait for their blocks are
        left out then."""
        taken = []
        while self._waiting and (every or self._waiting[0].ended or self._held > HELD_BYTES):
            request = self._waiting.popleft()
            request.ended = True
            if request.granted:
                request.capture()
            self._held -= request.size
            if request.ids is not None:
                taken.append(request)
        return taken


class TraceFile:
    """A new file of JSON lines, for its user alone (0600), which ends with a whole line. Calls
    block. OSError if it cannot be written. A file of that name is replaced."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._fd = open_private(os.fspath(path), flags)
        self._size = 0
        self._failed: OSError | None = None

    def header(self, source: str, block_size: int) -> None:
        header = {"source": source, "block_size": block_size}
        self._append(ENCODER.encode_lines([{"header": header}]))

    def requests(self, requests: Iterable[TracedRequest]) -> None:
        lines = [
            {
                "timestamp": round(1000 * one.at),
                "input_length": one.input_length,
                "output_length": one.output_length,
                "hash_ids": one.ids.tolist(),
            }
            for one in requests
            if one.ids is not None
        ]
        self._append(ENCODER.encode_lines(lines))

    def _append(self, data: bytes) -> None:
        if self._failed is not None:  # a trace without these lines would give wrong hit rates
            raise self._failed
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._failed = error
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._fd)


# -- requests of an open cache


class TraceRecording(Instrument):
    """A trace that is being recorded.

    A write that fails ends the recording: a trace without some of its requests would give wrong hit
    rates, one that ends early gives right ones. The cache goes on.

    Attributes:
        requests: that are in the file.
        error: why the recording has ended early, "" otherwise.
    """

    def __init__(self, cache: KVCache, file: TraceFile) -> None:
        self.requests = 0
        self.error = ""
        self._file = file
        self._instruments = cache.system.supervisor.instruments
        self._began = now()
        self._order = ArrivalOrder()
        self._leases: dict[int, TracedRequest] = {}
        self._preempted: dict[str, TracedRequest] = {}
        self._workers = Workers(1, "kvactors-trace")
        self._queued = 0  # bytes of requests that wait for the file
        self._instruments.add(self)

    # -- see `Instrument`

    def sent(self, receiver: ActorRef, envelope: Envelope[Any], turn: Turn | None) -> None:
        message: Any = envelope.message
        if isinstance(message, Acquire):
            self._arrived(message)
        elif isinstance(message, Finish | Preempt | Abandon):
            request = self._leases.pop(message.lease, None)
            if request is not None:
                self._over(request, message)

    def answered(
        self, receiver: ActorRef, envelope: Envelope[Any], value: Any, error: Exception | None
    ) -> None:
        message: Any = envelope.message
        if isinstance(message, Acquire) and (request := self._leases.get(message.lease)):
            request.granted = isinstance(value, AcquireResult)
            if not request.granted:
                del self._leases[message.lease]
                self._refused(request)

    def failed(self, actor: ActorRef, error: BaseException) -> None:
        """PrefixIndex has failed: its leases have ended."""
        if actor.role == PrefixIndex.ROLE:
            for lease, request in list(self._leases.items()):
                if request.granted:
                    del self._leases[lease]
                    self._over(request, None)

    # -- inner parts

    def _arrived(self, message: Acquire) -> None:
        path = message.path
        request = self._preempted.pop(message.request_id, None)
        if request is None:
            request = TracedRequest(now() - self._began, path.num_tokens)
            request.request_id = message.request_id
            self._order.add(request, path.num_full_blocks)
        request.path, request.granted = path, False
        self._leases[message.lease] = request

    def _refused(self, request: TracedRequest) -> None:
        request.path = None
        if request.ids is None or request.ended:
            request.ended = True
            self._write()
        else:
            self._preempted[request.request_id] = request

    def _over(self, request: TracedRequest, message: Finish | Preempt | Abandon | None) -> None:
        if not request.granted:  # the caller has given up before the answer
            self._refused(request)
            return
        request.capture()
        if isinstance(message, Preempt) and not request.ended:
            self._preempted[request.request_id] = request
            return
        if isinstance(message, Finish) and message.output_tokens is not None:
            request.output_length = max(request.output_length, message.output_tokens)
        request.ended = True
        self._write()

    def _write(self, *, every: bool = False) -> None:
        taken = self._order.take(every=every)
        for request in taken:
            if self._preempted.get(request.request_id) is request:
                del self._preempted[request.request_id]
        if self.error or not taken:
            return
        if self._queued > 2 * HELD_BYTES:
            self._end("the file is written too slowly")
            return
        self._queued += sum(request.size for request in taken)
        writing = asyncio.wrap_future(self._workers.submit(partial(self._file.requests, taken)))
        writing.add_done_callback(partial(self._written, taken))

    def _written(self, requests: list[TracedRequest], future: asyncio.Future[None]) -> None:
        self._queued -= sum(request.size for request in requests)
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._end(described(error))
        elif not self.error:
            self.requests += len(requests)

    def _end(self, error: str) -> None:
        self._instruments.remove(self)
        if not self.error:
            self.error = error
            log.warning("trace recording ended", error=error, requests=self.requests)
        self._order = ArrivalOrder()
        self._leases.clear()
        self._preempted.clear()

    async def close(self) -> None:
        self._instruments.remove(self)
        self._write(every=True)
        self._workers.submit(self._file.close)
        if not await self._workers.drained(CLOSE_S):
            self._end("the file was not written in time")
        self._workers.close()


@asynccontextmanager
async def record(cache: KVCache, path: str | os.PathLike[str]) -> AsyncIterator[TraceRecording]:
    """Record the requests of an open cache as a trace until the block ends.

    The trace is for `kvactors sweep` and `kvactors replay`. It has a line for each request that was
    granted: the time of its `acquire`, the lengths of prompt and output, and the ids of the
    prompt's whole blocks, in the order of arrival. A preempted request has one line. A line is
    written when its request and those before it have ended.

    Args:
        cache: the cache, on its event loop.
        path: of the file. One of that name is replaced. It is readable by its user alone (0600):
            who has the tokens of a prompt can find out whether the trace has it.

    Returns:
        A context manager. Inside its block is the `TraceRecording`.

    Raises:
        TypeError: `cache` is not an open cache.
        OSError: the file cannot be written.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be an open KVCache, not {kind(cache)}")
    cache._context.check()

    def begin() -> TraceFile:
        file = TraceFile(path)
        file.header("kvactors.record", cache.block_size)
        return file

    recording = TraceRecording(cache, await in_thread(begin, "kvactors-trace"))
    cache.system.recordings.append(recording)
    try:
        yield recording
    finally:
        cache.system.recordings.remove(recording)
        await recording.close()


# -- requests of an engine, from its KV events: `kvactors record`


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
        block_size: tokens of a block, 0 before the first event.
        repeated: blocks of `stored` that had been stored before.
        unknown_parents: blocks whose own path was published before the recording, or is lost.
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
        with closing(TraceFile(out)) as file:
            try:
                while not signals and not found.full and (left := until - time.monotonic()) > 0:
                    if not socket.poll(int(1000 * min(left, POLL_S))):
                        continue
                    has_header = found.block_size
                    found.message(socket.recv_multipart())
                    if found.block_size and not has_header:
                        file.header(endpoint, found.block_size)
                    file.requests(found.order.take())
                    show(f"{found.requests:,} requests", found.requests)
            finally:
                file.requests(found.order.take(every=True))
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
