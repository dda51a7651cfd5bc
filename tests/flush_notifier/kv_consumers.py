"""Models of the consumers of KV events: how each numbers, asks for replays and keeps its state.
Written from their sources.

A model is pure state. `wants` gives the number from which it asks for a replay before it takes a
live batch, `replayed` takes an answer, `live` a live batch. A strict model counts what a real one
silently passes over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from tests.support.kv_events import BlockRemoved, BlockStored, decode_batch


class Index:
    """Blocks by medium, as a set. doubles: blocks stored where they are already."""

    def __init__(self) -> None:
        self.held: dict[str, set[Any]] = defaultdict(set)
        self.doubles = self.orphans = self.empty = 0

    def batch(self, payload: bytes) -> None:
        events = decode_batch(payload)[1]
        self.empty += not events
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for one in event.block_hashes:
                    self.store(one, parent, event.medium or "")
                    parent = one
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    self.remove(one, event.medium or "")
            else:
                self.clear()

    def store(self, one: Any, parent: Any, medium: str) -> None:
        self.doubles += one in self.held[medium]
        self.held[medium].add(one)

    def remove(self, one: Any, medium: str) -> None:
        self.held[medium].discard(one)

    def clear(self) -> None:
        self.held.clear()

    def view(self) -> dict[str, set[Any]]:
        return {medium: set(blocks) for medium, blocks in self.held.items() if blocks}


class DeviceTree(Index):
    """Dynamo's index: on the device a block is stored below its parent, and removed with it. Other
    media ignore parents."""

    def __init__(self) -> None:
        super().__init__()
        self.above: dict[Any, Any] = {}

    def store(self, one: Any, parent: Any, medium: str) -> None:
        if medium == "GPU" and parent is not None and parent not in self.held[medium]:
            self.orphans += 1
            return
        super().store(one, parent, medium)
        if medium == "GPU":
            self.above[one] = parent

    def remove(self, one: Any, medium: str) -> None:
        super().remove(one, medium)
        if medium == "GPU":
            self.above.pop(one, None)
            for below in [key for key, parent in self.above.items() if parent == one]:
                self.remove(below, medium)

    def clear(self) -> None:
        super().clear()
        self.above.clear()


class Counted(Index):
    """llm-d's: stores of a block are counted by medium, and a store whose parent is on no medium is
    passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.stores: Counter[Any] = Counter()

    def store(self, one: Any, parent: Any, medium: str) -> None:
        if parent is not None and not any(parent in blocks for blocks in self.held.values()):
            self.orphans += 1
            return
        super().store(one, parent, medium)
        self.stores[one, medium] += 1

    def remove(self, one: Any, medium: str) -> None:
        self.stores[one, medium] -= 1
        if self.stores[one, medium] <= 0:
            del self.stores[one, medium]
            super().remove(one, medium)

    def clear(self) -> None:
        super().clear()
        self.stores.clear()


class Dynamo:
    """Asks from 0 if the first batch it sees is not number 0, and from the one it lacks later;
    passes over batches up to its cursor. A replay is taken from any first number. Then the last
    number in it is the cursor."""

    def __init__(self) -> None:
        self.index = DeviceTree()
        self.cursor: int | None = None
        self.asked: list[int] = []

    def wants(self, number: int) -> int | None:
        start = 0 if self.cursor is None else self.cursor + 1
        return start if number > start else None

    def replayed(self, start: int, answer: list[tuple[int, bytes]]) -> None:
        self.asked.append(start)
        for number, payload in answer:
            self.index.batch(payload)
            self.cursor = number

    def live(self, number: int, payload: bytes) -> None:
        if self.cursor is None or number > self.cursor:
            self.index.batch(payload)
            self.cursor = number

    @property
    def next(self) -> int:
        return 0 if self.cursor is None else self.cursor + 1


class VllmRouter(Dynamo):
    """vllm-router 0.1.17. A live number below the last live one is a restart: everything is
    forgotten. An answer counts only if it begins where it asked, has every number, and reaches the
    live batch for which it asked. Otherwise it forgets everything, and goes on with live
    batches."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.last_live = -1
        self.refused = 0

    def wants(self, number: int) -> int | None:
        if number < self.last_live:
            self.index.clear()
            self.cursor = None
        self.last_live = number
        return super().wants(number)

    def replayed(self, start: int, answer: list[tuple[int, bytes]]) -> None:
        numbers = [number for number, _ in answer]
        if (
            numbers == list(range(start, start + len(numbers)))
            and start + len(numbers) > self.last_live
        ):
            super().replayed(start, answer)
        else:
            self.index.clear()
            self.cursor = self.last_live - 1
            self.refused += 1


class LlmD:
    """Asks from 0 as soon as it is connected. A lower number is a restart. Numbers of a replay must
    follow each other. insists: an answer that begins at another number is dropped with the whole
    state, and it asks again after a while (older versions). Later versions drop the state and take
    the answer."""

    def __init__(self, *, insists: bool = True) -> None:
        self.index = Counted()
        self.insists = insists
        self.last: int | None = None
        self.last_live: int | None = None
        self.refused = 0

    def connected(self) -> int | None:
        return 0 if self.last is None else None

    def wants(self, number: int) -> int | None:
        if self.last_live is not None and number < self.last_live:
            self.index.clear()
            self.last = None
        self.last_live = number
        if self.last is None:
            return 0 if number else None
        return self.last + 1 if number > self.last + 1 else None

    def replayed(self, start: int, answer: list[tuple[int, bytes]]) -> None:
        expected = start
        for i, (number, payload) in enumerate(answer):
            if not i and number > expected and not self.insists:
                self.index.clear()
                expected = number
            if number != expected:
                self.index.clear()
                self.last = None
                self.refused += 1
                return
            self.index.batch(payload)
            self.last = number
            expected += 1

    def live(self, number: int, payload: bytes) -> None:
        if number == (0 if self.last is None else self.last + 1):
            self.index.batch(payload)
            self.last = number

    @property
    def next(self) -> int:
        return 0 if self.last is None else self.last + 1
