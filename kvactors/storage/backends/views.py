"""The edge of the stores: views that hold no object are refused before their memory is used."""

from __future__ import annotations

from collections.abc import Sequence


def unfit_views(
    views: Sequence[memoryview], count: int, block_bytes: int, *, writable: bool
) -> frozenset[int]:
    """Positions whose view cannot hold an object: too short, too long, with gaps, or missing.

    A store moves `block_bytes` bytes from the start of a view, so a shorter one would expose the
    memory behind it.

    Args:
        views: of the objects.
        count: objects of the batch.
        block_bytes: bytes of an object.
        writable: whether the views are written.
    """
    unfit = {
        i
        for i, view in enumerate(views)
        if view.nbytes != block_bytes or not view.c_contiguous or (writable and view.readonly)
    }
    return frozenset(unfit.union(range(len(views), count)))
