"""Which copies are made for which pieces: every byte once, and neighbours together."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.data_plane.cuda.copies import (
    BATCH_FROM,
    MERGE_FROM,
    NEVER,
    STAGE_FROM,
    Choice,
    RunTiming,
    Timing,
    choose,
)
from kvactors.data_plane.cuda.copy_plan import Columns, CopyPlan, join_columns, plan_copies, runs

PITCH = (1 << 31) - 1


def columns(*rows: tuple[int, int, int, int]) -> Columns:
    return Columns(*(np.array(one, np.int64) for one in zip(*rows, strict=True)))


def moved(plan: CopyPlan) -> dict[int, int]:
    """The host address of each byte on the device. No byte may be copied twice."""
    found: dict[int, int] = {}

    def copy(on_device: int, on_host: int, size: int) -> None:
        for i in range(size):
            assert on_device + i not in found
            found[on_device + i] = on_host + i

    for one in zip(
        plan.on_device.tolist(), plan.on_host.tolist(), plan.sizes.tolist(), strict=True
    ):
        copy(*one)
    for r in plan.rectangles:
        assert r.width <= min(r.device_pitch, r.host_pitch), "rows would overlap"
        for row in range(r.height):
            copy(r.on_device + row * r.device_pitch, r.on_host + row * r.host_pitch, r.width)
    return found


def one_by_one(table: Columns, blocks: np.ndarray, places: np.ndarray) -> dict[int, int]:
    return {
        int(table.regions[c] + b * table.strides[c]) + i: int(p + table.offsets[c]) + i
        for b, p in zip(blocks.tolist(), places.tolist(), strict=True)
        for c in range(len(table.sizes))
        for i in range(int(table.sizes[c]))
    }


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_is_copied_once_to_its_place(seed: int):
    """Drawn tables: pieces next to one another or not, in one allocation or several, of dense or
    strided tensors, blocks with neighbours."""
    rng = np.random.default_rng(seed)
    count, total = int(rng.integers(1, 6)), 40
    sizes = rng.integers(1, 9, count)
    offsets = np.cumsum(sizes) - sizes
    if rng.random() < 0.5:  # one tensor of whole blocks
        stride = int(sizes.sum()) + int(rng.integers(0, 2)) * 5
        table = Columns(1000 + offsets, np.full(count, stride), sizes, offsets)
    else:
        strides = sizes + rng.integers(0, 2, count) * 3
        regions = 1000 + np.cumsum(strides * total) - strides * total
        table = Columns(regions, strides, sizes, offsets)
    slot = int(sizes.sum()) + int(rng.integers(0, 2)) * 7
    blocks = np.sort(rng.choice(total, int(rng.integers(1, 20)), replace=False))
    order = np.arange(len(blocks)) if rng.random() < 0.7 else rng.permutation(len(blocks))
    slots = np.sort(rng.choice(30, len(blocks), replace=False))
    if rng.random() < 0.5:
        slots = np.arange(len(blocks))
    blocks, places = blocks[order], 10**6 + slots * slot
    allocations = rng.integers(0, 2, count)
    joined = join_columns(table, allocations)
    limit = PITCH if rng.random() < 0.8 else 3
    plan = plan_copies(joined, blocks, places, slot, int(rng.integers(2, 5)), limit)
    assert moved(plan) == one_by_one(table, blocks, places)


def test_pieces_that_follow_one_another_on_both_sides_are_one_column():
    table = columns((100, 30, 10, 0), (110, 30, 10, 10), (120, 30, 10, 20))
    assert join_columns(table, np.zeros(3, np.int64)).sizes.tolist() == [30]
    assert join_columns(table, np.array([1, 1, 2])).sizes.tolist() == [20, 10]
    other = table._replace(strides=np.array([30, 30, 40]))
    assert join_columns(other, np.zeros(3, np.int64)).sizes.tolist() == [20, 10]
    gap = table._replace(offsets=np.array([0, 12, 22]))
    assert join_columns(gap, np.zeros(3, np.int64)).sizes.tolist() == [10, 20]


def test_neighbouring_blocks_without_gaps_are_one_copy():
    plan = plan_copies(
        columns((100, 30, 30, 0)), np.arange(3, 8), 1000 + 30 * np.arange(5), 30, 2, PITCH
    )
    assert (plan.on_device.tolist(), plan.on_host.tolist(), plan.sizes.tolist()) == (
        [190],
        [1000],
        [150],
    )
    assert plan.rectangles == []


def test_neighbouring_blocks_with_gaps_are_one_rectangle_a_piece():
    table = columns((100, 10, 10, 0), (500, 20, 20, 10))
    blocks, places = np.array([3, 4, 5, 9]), 1000 + 30 * np.array([0, 1, 2, 3])
    plan = plan_copies(table, blocks, places, 30, 3, PITCH)
    assert plan.rectangles == [(130, 1000, 10, 3, 10, 30), (560, 1010, 20, 3, 20, 30)]
    assert plan.on_device.tolist() == [190, 680]
    for merge_from, limit in ((4, PITCH), (NEVER, PITCH), (2, 29)):
        plan = plan_copies(table, blocks, places, 30, merge_from, limit)
        assert plan.rectangles == []
        assert len(plan.sizes) == 8


def test_a_run_ends_where_either_side_jumps():
    first, lengths = runs(np.array([1, 2, 3, 7, 8, 7]), np.array([0, 5, 15, 20, 25, 30]), 5)
    assert (first.tolist(), lengths.tolist()) == ([0, 2, 3, 5], [2, 1, 2, 1])


def test_choices_follow_from_timings():
    timings = [
        Timing(4096, 9.0, 4.0, 5.0),
        Timing(8192, 6.0, 6.0, 5.5),
        Timing(16384, 7.0, 9.0, 8.0),
    ]
    lengths = [RunTiming(2, 1.0, 2.0), RunTiming(4, 2.0, 2.0), RunTiming(8, 4.0, 2.0)]
    assert choose(timings, lengths, 64) == Choice(16384, 64 * 8192, 4)
    slow = [one._replace(gathered=9.5) for one in timings]
    assert choose(slow, [RunTiming(2, 1.0, 2.0)], 64) == Choice(8192, NEVER, NEVER)
    small = [timings[0], timings[1], timings[2]._replace(gathered=0.0)]
    assert choose(small, (), 64) == Choice(16384, 64 * 8192, MERGE_FROM), "where it was measured"
    impossible = [one._replace(gathered=float("nan")) for one in timings]
    assert choose(impossible, [RunTiming(2, 0.0, 2.0)], 64)[1:] == (STAGE_FROM, MERGE_FROM)
    assert choose((), (), 64) == Choice(BATCH_FROM, STAGE_FROM, MERGE_FROM)
