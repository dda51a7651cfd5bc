"""Which copies are made for which pieces: every byte once, and neighbours together."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.data_plane.cuda.copies import Columns, join_columns, plan_copies


def columns(*rows: tuple[int, int, int, int]) -> Columns:
    return Columns(*(np.array(one, np.int64) for one in zip(*rows, strict=True)))


def moved(plan: tuple[np.ndarray, ...]) -> dict[int, int]:
    """The host address of each byte on the device. No byte may be copied twice."""
    found: dict[int, int] = {}
    for on_device, on_host, size in zip(*(one.tolist() for one in plan), strict=True):
        for i in range(size):
            assert on_device + i not in found
            found[on_device + i] = on_host + i
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
    assert moved(plan_copies(joined, blocks, places)) == one_by_one(table, blocks, places)


def test_pieces_that_follow_one_another_on_both_sides_are_one_column():
    table = columns((100, 30, 10, 0), (110, 30, 10, 10), (120, 30, 10, 20))
    assert join_columns(table, np.zeros(3, np.int64)).sizes.tolist() == [30]
    assert join_columns(table, np.array([1, 1, 2])).sizes.tolist() == [20, 10]
    other = table._replace(strides=np.array([30, 30, 40]))
    assert join_columns(other, np.zeros(3, np.int64)).sizes.tolist() == [20, 10]
    gap = table._replace(offsets=np.array([0, 12, 22]))
    assert join_columns(gap, np.zeros(3, np.int64)).sizes.tolist() == [10, 20]


@pytest.mark.parametrize(
    ("blocks", "slots", "copied"),
    [
        ([3, 4, 5, 6, 7], [0, 1, 2, 3, 4], [(190, 1000, 150)]),
        ([1, 2, 7, 8], [0, 1, 2, 4], [(130, 1000, 60), (310, 1060, 30), (340, 1120, 30)]),
    ],
    ids=["neighbours", "jumps on either side"],
)
def test_whole_blocks_that_follow_one_another_are_one_copy(blocks, slots, copied):
    places = 1000 + 30 * np.array(slots)
    plan = plan_copies(columns((100, 30, 30, 0)), np.array(blocks), places)
    assert list(zip(*(one.tolist() for one in plan), strict=True)) == copied
