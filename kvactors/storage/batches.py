"""Batches of a storage actor: the limit of concurrent batches, and the changes of each to the
store. Pure state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from kvactors.storage.messages import BatchDone
from kvactors.types import Reason, join_hashes, split_hashes

IN_FLIGHT = 2
"""Batches that an actor has at the store at a time. The others wait, which bounds the bytes in
flight."""


class Batch(NamedTuple):
    """A call to the store.

    Attributes:
        work: makes the coroutine.
        failed: the result if the back end raises, which its contract forbids.
        slots: host slots that the batch accesses.
        keys: joined keys that the batch is about.
    """

    work: Callable[[], Coroutine[Any, Any, BatchDone]]
    failed: BatchDone
    slots: Sequence[int] = ()
    keys: bytes = b""


class BatchQueue:
    """Batches in flight and batches that wait for one of them to end."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._waiting: deque[Batch] = deque()

    def add(self, batch: Batch) -> None:
        """A batch waits for its turn."""
        self._waiting.append(batch)

    def startable(self) -> Iterator[Batch]:
        """The batches that may start now. The caller starts each of them."""
        while self._waiting and self.in_flight < IN_FLIGHT:
            self.in_flight += 1
            yield self._waiting.popleft()


class Holder(Protocol):
    """The keys that a store holds."""

    def holding(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that it holds, in order."""


class Changes(NamedTuple):
    """Changes to report to indexes after a batch.

    Attributes:
        removed: joined keys that the store does not hold any more, by reason.
        stored: joined keys that it holds now.
        acknowledged: keys whose removal needs no other report.
    """

    removed: list[tuple[bytes, Reason]]
    stored: bytes
    acknowledged: list[bytes]


def changes_of(done: BatchDone, store: Holder) -> Changes:
    """The changes of a batch that are still true. A key that came back since is reported by the
    actor that wrote it."""
    removed: list[tuple[bytes, Reason]] = []
    acknowledged: list[bytes] = []
    for keys, reason in (
        (done.evicted, Reason.STORAGE_EVICTION),
        (done.corrupt, Reason.CORRUPT),
        (done.taken, Reason.PROMOTION),
    ):
        if not keys:
            continue
        split = split_hashes(keys)
        held = set(store.holding(split))
        gone = join_hashes(key for key in split if key not in held)
        if gone:
            removed.append((gone, reason))
        acknowledged += split
    stored = join_hashes(store.holding(split_hashes(done.stored))) if done.stored else b""
    return Changes(removed, stored, acknowledged)
