"""A strict reader of KV events in the role of a router: it rebuilds a node's contents from its
messages alone, loses some, and recovers.

`Mirror` is the pure state, `Reader` has the sockets, and `python -m tests.support.mirror` is
a separate process: a line `report N` on its input is answered with the mirror as JSON once batch
N - 1 has been applied."""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import zmq
from msgspec.structs import asdict
from zmq.utils.monitor import recv_monitor_message

from kvactors.flush_notifier.sinks.kv_wire import END, encode_sequence
from tests.support.child import Child
from tests.support.kv_events import BlockRemoved, BlockStored, Event, Hash, decode_batch

# -- identities of blocks
#
# A router does not look up block hashes: it has a prompt, and computes from the events what
# identifies each block. Two blocks with different hashes and one identity are one block to it, and
# a block whose events disagree is two.


def as_dynamo(event: BlockStored, block: int) -> Any:
    """Adapter, salt and media of each event alone. Nothing is carried over from other tiers'
    events."""
    infos: list[Any] = getattr(event, "block_mm_infos", None) or [None] * len(event.block_hashes)
    objects = (infos[block] or {"mm_objects": []})["mm_objects"]
    return (
        event.lora_name,
        getattr(event, "cache_salt", None),
        sorted(one["mm_hash"] for one in objects),
    )


def as_vllm(event: BlockStored, block: int) -> Any:
    """The extra keys of each block. A salt counts for all blocks below the one that carries it."""
    return event.extra_keys[block] if event.extra_keys else None


READERS: tuple[Callable[[BlockStored, int], Any], ...] = (as_dynamo, as_vllm)


# -- the mirror

RADIX = "GPU"
"""The medium that routers keep as a radix tree."""

PATIENCE = 2.0
"""Seconds for one message of an answer from the replay socket."""


class MirrorStatistics(msgspec.Struct):
    """applied: batches. dropped: lost on purpose. gaps: noticed. replayed: batches had from replay.
    states: replays from the beginning. connections: made."""

    applied: int = 0
    dropped: int = 0
    gaps: int = 0
    replayed: int = 0
    states: int = 0
    connections: int = 0


class Mirror:
    """An index that finds a block's place by its parent, as routers do: it rejects a block whose
    parent is nowhere, or on GPU if that is where the block is announced. With a removed block,
    all blocks below it are removed as well (from GPU, or from everywhere).

    view: hashes by medium. expected: number of the next batch. orphans: blocks that were rejected
    or cut off so."""

    def __init__(self) -> None:
        self.view: dict[str, set[Hash]] = {}
        self.expected = 0
        self.orphans = 0
        self._parents: dict[Hash, Hash | None] = {}  # of the blocks in the view
        self._below: dict[Hash, set[Hash]] = {}  # blocks in the view, by parent
        # what identifies each block for each kind of reader, and events that disagree about a block
        self._known: list[dict[Hash, bytes]] = [{} for _ in READERS]
        self._changed = 0

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._identify(event)
                parent = event.parent_block_hash
                for block in event.block_hashes:
                    self._store(block, parent, event.medium or "")
                    parent = block
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    self._remove(block, event.medium or "")
            else:
                self._forget()

    def _held(self, block: Hash, medium: str) -> bool:
        """Whether a block is on RADIX, if that is the medium. For other media, whether it is on
        any."""
        return block in self.view.get(medium, ()) if medium == RADIX else block in self._parents

    def _store(self, block: Hash, parent: Hash | None, medium: str) -> None:
        if parent is not None and not self._held(parent, medium):
            self.orphans += 1
            return
        self.view.setdefault(medium, set()).add(block)
        self._parents[block] = parent
        if parent is not None:
            self._below.setdefault(parent, set()).add(block)

    def _remove(self, block: Hash, medium: str) -> None:
        held = self.view.setdefault(medium, set())
        if block not in held:
            return
        held.discard(block)
        nowhere = not any(block in blocks for blocks in self.view.values())
        for below in list(self._below.get(block, ())):
            for other in [RADIX] if not nowhere else list(self.view):
                if (nowhere or medium == RADIX) and below in self.view.get(other, ()):
                    self.orphans += 1
                    self._remove(below, other)
        if nowhere:
            parent = self._parents.pop(block)
            if parent is not None:
                self._below[parent].discard(block)
                if not self._below[parent]:
                    del self._below[parent]

    def batch(self, number: int, events: Sequence[Event]) -> bool:
        """Take a numbered batch; False if there is a gap before it. An old one is passed over."""
        if number > self.expected:
            return False
        if number == self.expected:
            self.apply(events)
            self.expected = number + 1
        return True

    def restart(self) -> None:
        self._forget()
        self.expected = 0

    def replayed(self, number: int, events: Sequence[Event]) -> None:
        """Take a batch of an answer, which may begin at any number."""
        self.expected = max(self.expected, number)
        self.batch(number, events)

    def _forget(self) -> None:
        self.view.clear()
        self._parents.clear()
        self._below.clear()
        for known in self._known:
            known.clear()

    def _identify(self, event: BlockStored) -> None:
        tokens = event.token_ids
        assert isinstance(tokens, list), "an event that was read"
        for read, known in zip(READERS, self._known, strict=True):
            parent = event.parent_block_hash
            for block, number in enumerate(event.block_hashes):
                above = b"" if parent is None else known.get(parent, repr(parent).encode())
                own = tokens[block * event.block_size : (block + 1) * event.block_size]
                content = hashlib.sha256(
                    msgspec.msgpack.encode((above, read(event, block), own))
                ).digest()
                self._changed += known.setdefault(number, content) != content
                parent = number

    def ambiguous(self) -> int:
        """Blocks that a reader takes for others, on any medium, and events that disagree about a
        block."""
        held = set[Hash]().union(*self.view.values())
        found = self._changed
        for known in self._known:
            contents = [known[number] for number in held if number in known]
            found += len(contents) - len(set(contents))
        return found


class Reader:
    """A subscriber with a mirror. lose: share of the live messages that it drops, drawn from
    `seed`. Whenever a connection is (re)made it forgets everything and asks for a replay from 0,
    and what was queued is void: numbers of a publisher that begins at 0 again could not tell.
    """

    def __init__(
        self, endpoint: str, replay: str, topic: str = "", lose: float = 0.0, seed: int = 0
    ) -> None:
        self.mirror = Mirror()
        self._replay = replay
        self._lose = lose
        self._random = random.Random(seed)
        self.statistics = MirrorStatistics()
        self._context: Any = zmq.Context.instance()
        self.socket: Any = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.monitor: Any = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.monitor, zmq.POLLIN)

    def step(self, timeout: float) -> None:
        """Wait for something at most `timeout` seconds and take everything there is."""
        ready = dict(self.poller.poll(int(1000 * timeout)))
        if self.monitor in ready:
            recv_monitor_message(self.monitor)
            self.statistics.connections += 1
            while self.socket.poll(0):
                self.socket.recv_multipart()
            self.mirror.restart()
            self.statistics.states += 1
            self.catch_up()
        while self.socket.poll(0):
            _, number, payload = self.socket.recv_multipart()
            self._live(int.from_bytes(number, "big"), payload)

    def _live(self, number: int, payload: bytes) -> None:
        if self._random.random() < self._lose:
            self.statistics.dropped += 1
            return
        if number > self.mirror.expected:
            self.statistics.gaps += 1
            self.catch_up()
        self.statistics.applied += number == self.mirror.expected
        self.mirror.batch(number, decode_batch(payload)[1])

    def catch_up(self) -> bool:
        """Request the batches that are missing. False without an answer."""
        answer = self._ask(encode_sequence(self.mirror.expected))
        for number, payload in answer or ():
            self.statistics.replayed += number >= self.mirror.expected
            self.mirror.replayed(number, decode_batch(payload)[1])
        return answer is not None

    def _ask(self, body: bytes) -> list[tuple[int, bytes]] | None:
        # a REQ socket would take the first message only
        socket: Any = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._replay)
            socket.send_multipart([b"", body])
            answer: list[tuple[int, bytes]] = []
            while socket.poll(int(1000 * PATIENCE)):
                *_, number, payload = socket.recv_multipart()
                if int.from_bytes(number, "big") == END:
                    return answer
                answer.append((int.from_bytes(number, "big"), payload))
            return None
        finally:
            socket.close()

    def reach(self, sequence: int, deadline: float) -> bool:
        """Take messages until every batch before `sequence` has been applied, for at most
        `deadline` seconds."""
        until = time.monotonic() + deadline
        while self.mirror.expected < sequence and time.monotonic() < until:
            before = self.mirror.expected
            self.step(0.1)
            if self.mirror.expected == before:
                self.catch_up()
        return self.mirror.expected >= sequence

    def report(self) -> dict[str, Any]:
        return {
            "sequence": self.mirror.expected,
            "view": {medium: hashes for medium, hashes in self.mirror.view.items() if hashes},
            "ambiguous": self.mirror.ambiguous(),
            "statistics": asdict(self.statistics) | {"orphans": self.mirror.orphans},
        }

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=0)


def differing(view: Mapping[str, Collection[Any]], truth: Mapping[str, Collection[Any]]) -> int:
    """Blocks on which a reader's view differs from the truth, both by medium."""
    media = view.keys() | truth.keys()
    return sum(len(set(view.get(one, ())) ^ set(truth.get(one, ()))) for one in media)


async def compare(
    reader: Child, sequence: int, truth: Mapping[str, Collection[int]]
) -> dict[str, int]:
    """Compare the mirror of a reader's process with the tiers, once it has read every batch before
    `sequence`. Returns the reader's counts. divergence: blocks on which its view differs.
    ambiguous: blocks that it cannot tell apart by tokens, adapter, salt and media."""
    await reader.send(f"report {sequence}")
    said = msgspec.json.decode(await reader.receive())
    return {
        "divergence": differing(said["view"], truth),
        "ambiguous": said["ambiguous"],
        "behind": max(0, sequence - said["sequence"]),
        **said["statistics"],
    }


def main() -> None:
    """Read until the input ends."""
    parser = argparse.ArgumentParser(
        description="Mirror a publisher of KV events; `report N` on the input prints the mirror as "
        "JSON."
    )
    parser.add_argument("endpoint")
    parser.add_argument("replay")
    parser.add_argument("--topic", default="")
    parser.add_argument("--lose", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    reader = Reader(**vars(parser.parse_args()))
    reader.poller.register(sys.stdin.fileno(), zmq.POLLIN)
    print("ready", flush=True)
    while True:
        reader.step(1.0)
        if dict(reader.poller.poll(0)).get(sys.stdin.fileno()):
            words = sys.stdin.readline().split()
            if not words:
                return
            reader.reach(int(words[1]), 30.0)
            print(msgspec.json.encode(reader.report()).decode(), flush=True)


if __name__ == "__main__":
    main()
