"""Fewer copies for the same bytes: neighbouring pieces and neighbouring blocks are copied together.

Pieces that follow one another on the device and in the slot are one column. Pairs whose blocks and
slots follow one another are one run. A column of a run is one copy if its rows have no gaps, and
otherwise one copy of a rectangle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


class Columns(NamedTuple):
    """Bytes of a block that are contiguous on the device and in a slot: address of the first row,
    bytes from a row to the next one, bytes of a row, bytes from the start of a slot. Arrays of the
    same length."""

    regions: Numbers
    strides: Numbers
    sizes: Numbers
    offsets: Numbers


class Rectangle(NamedTuple):
    """A copy of rows with gaps between them."""

    on_device: int
    on_host: int
    width: int
    height: int
    device_pitch: int
    host_pitch: int


class CopyPlan(NamedTuple):
    """Copies between the device and the host, in any order."""

    on_device: Numbers
    on_host: Numbers
    sizes: Numbers
    rectangles: list[Rectangle]


def join_columns(columns: Columns, allocations: Numbers) -> Columns:
    """Columns in which neighbours are joined. A copy must not reach from one allocation into
    another one, even if their addresses follow one another."""
    if len(columns.sizes) < 2:
        return columns
    regions, strides, sizes, offsets = columns
    joined = (
        (regions[:-1] + sizes[:-1] == regions[1:])
        & (strides[:-1] == strides[1:])
        & (offsets[:-1] + sizes[:-1] == offsets[1:])
        & (allocations[:-1] == allocations[1:])
    )
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return Columns(regions[first], strides[first], np.add.reduceat(sizes, first), offsets[first])


def runs(rows: Numbers, places: Numbers, step: int) -> tuple[Numbers, Numbers]:
    """Pairs that follow one another on both sides: the first pair of each run, and its length."""
    broken = (np.diff(rows) != 1) | (np.diff(places) != step)
    first = np.flatnonzero(np.concatenate(([True], broken)))
    return first, np.diff(np.append(first, len(rows)))


def plan_copies(
    columns: Columns, rows: Numbers, places: Numbers, step: int, merge_from: int, max_pitch: int
) -> CopyPlan:
    """The copies of n pairs. merge_from: length of a run from which on its rows are one rectangle,
    at least 2."""
    first, lengths = runs(rows, places, step)
    regions, strides, sizes, offsets = columns
    dense = (strides == sizes) & (sizes == step)
    pitched = ~dense & (strides <= max_pitch) & (step <= max_pitch)
    long = lengths >= merge_from
    rectangles = [
        Rectangle(
            int(regions[c] + rows[j] * strides[c]),
            int(places[j] + offsets[c]),
            int(sizes[c]),
            int(length),
            int(strides[c]),
            step,
        )
        for j, length in zip(first[long].tolist(), lengths[long].tolist(), strict=True)
        for c in np.flatnonzero(pitched).tolist()
    ]
    short = np.repeat(~long, lengths)
    parts = [
        _grid(columns, dense, rows[first], places[first], lengths),
        _grid(columns, pitched, rows[short], places[short], None),
        _grid(columns, ~dense & ~pitched, rows, places, None),
    ]
    on_device, on_host, nbytes = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return CopyPlan(on_device, on_host, nbytes, rectangles)


def _grid(
    columns: Columns,
    chosen: NDArray[np.bool_],
    rows: Numbers,
    places: Numbers,
    lengths: Numbers | None,
) -> tuple[Numbers, Numbers, Numbers]:
    """Every chosen column of every row, `lengths` rows long."""
    regions, strides, sizes, offsets = (one[chosen] for one in columns)
    on_device = regions + rows[:, None] * strides
    on_host = places[:, None] + offsets
    nbytes = np.broadcast_to(sizes, on_device.shape)
    if lengths is not None:
        nbytes = nbytes * lengths[:, None]
    return on_device.ravel(), on_host.ravel(), nbytes.ravel()
