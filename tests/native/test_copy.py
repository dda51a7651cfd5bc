"""Gather, scatter, patterns and plain copies, against the same moves done with numpy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvactors.native import check_blocks, copy_bytes, fill_blocks, gather, scatter, touch

UNTOUCHED = 0xEE
Ids = NDArray[np.int64]


def ids(*values: int) -> Ids:
    return np.array(values, np.int64)


@dataclass
class Memory:
    """Device regions, each an array [block][piece], and an arena [slot][stride]."""

    device: list[NDArray[np.uint8]]
    arena: NDArray[np.uint8]

    @classmethod
    def make(
        cls, pieces: list[int], blocks: int, slots: int, gap: int = 0, seed: int = 0
    ) -> Memory:
        rng = np.random.default_rng(seed)
        device = [rng.integers(0, 256, (blocks, piece), np.uint8) for piece in pieces]
        return cls(device, np.full((slots, sum(pieces) + gap), UNTOUCHED, np.uint8))

    @property
    def regions(self) -> tuple[Ids, Ids, int]:
        addresses = ids(*(region.ctypes.data for region in self.device))
        return addresses, ids(*(region.shape[1] for region in self.device)), self.device[0].shape[0]

    @property
    def slots(self) -> tuple[int, int, int]:
        return int(self.arena.ctypes.data), self.arena.shape[1], self.arena.shape[0]

    def move(self, how: Callable[..., None], blocks: Ids, slots: Ids) -> None:
        how(*self.regions, blocks, *self.slots, slots)

    def block(self, block: int) -> NDArray[np.uint8]:
        return np.concatenate([region[block] for region in self.device])


def bad_moves() -> dict[str, Callable[[Memory], tuple[Any, ...]]]:
    return {
        "block id out of range": lambda m: (*m.regions, ids(0, 4), *m.slots, ids(0, 1)),
        "block id out of": lambda m: (*m.regions, ids(-1), *m.slots, ids(0)),
        "slot id out of range": lambda m: (*m.regions, ids(0), *m.slots, ids(3)),
        "slot id out of": lambda m: (*m.regions, ids(0), *m.slots, ids(-1)),
        "blocks and slots differ": lambda m: (*m.regions, ids(0, 1), *m.slots, ids(0)),
        "regions and piece_bytes differ": lambda m: (
            m.regions[0],
            ids(8),
            4,
            ids(0),
            *m.slots,
            ids(0),
        ),
        "must not be negative": lambda m: (m.regions[0], ids(8, -1), 4, ids(0), *m.slots, ids(0)),
        "larger than a slot": lambda m: (*m.regions, ids(0), m.slots[0], 15, 3, ids(0)),
    }


@pytest.mark.parametrize("how", [gather, scatter])
@pytest.mark.parametrize("message", bad_moves())
def test_bad_moves_are_refused_and_nothing_is_copied(
    how: Callable[..., None], message: str
) -> None:
    memory = Memory.make([8, 8], blocks=4, slots=3)
    device = [region.copy() for region in memory.device]
    with pytest.raises(ValueError, match=message):
        how(*bad_moves()[message](memory))
    assert (memory.arena == UNTOUCHED).all()
    assert all(
        np.array_equal(now, before) for now, before in zip(memory.device, device, strict=True)
    )


def keys(*names: int) -> bytes:
    return b"".join(name.to_bytes(32, "big") for name in names)


def test_a_pattern_follows_the_key_through_a_copy() -> None:
    memory = Memory.make([64, 24], blocks=4, slots=2)
    fill_blocks(*memory.regions, ids(0, 1), keys(7, 8))
    memory.move(gather, ids(0, 1), ids(1, 0))
    memory.move(scatter, ids(3, 2), ids(1, 0))
    assert check_blocks(*memory.regions, ids(3, 2), keys(7, 8)) == []
    assert check_blocks(*memory.regions, ids(2, 3), keys(7, 8)) == [0, 1]
    assert check_blocks(*memory.regions, ids(3, 2), keys(7, 9)) == [1]


@pytest.mark.parametrize("how", [fill_blocks, check_blocks])
def test_patterns_need_a_key_for_each_block(how: Callable[..., Any]) -> None:
    memory = Memory.make([8], blocks=2, slots=1)
    before = memory.device[0].copy()
    with pytest.raises(ValueError, match="32 bytes for each block"):
        how(*memory.regions, ids(0, 1), keys(1))
    with pytest.raises(ValueError, match="out of range"):
        how(*memory.regions, ids(2), keys(1))
    assert np.array_equal(memory.device[0], before)


def test_copies_let_other_threads_run() -> None:
    """This thread runs in the middle of a copy made by another."""
    size = 128 << 20
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    touch(int(target.ctypes.data), size)
    spans: list[tuple[float, float]] = []
    turns: list[float] = []

    def copy() -> None:
        for _ in range(4):
            began = time.perf_counter()
            copy_bytes(int(target.ctypes.data), int(source.ctypes.data), size)
            spans.append((began, time.perf_counter()))

    thread = threading.Thread(target=copy)
    thread.start()
    while thread.is_alive():
        turns.append(time.perf_counter())
    thread.join()
    assert target[-1] == 1
    inside = sum(
        began + (ended - began) / 4 < at < ended - (ended - began) / 4
        for began, ended in spans
        for at in turns[::50]
    )
    assert inside > 0, "the copies kept the interpreter to themselves"
