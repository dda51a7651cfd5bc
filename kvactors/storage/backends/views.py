"""The edge of the stores: views that hold no object are refused before their memory is used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvactors.storage.messages import Outcome


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


async def move_fitting(
    keys: Sequence[bytes],
    views: Sequence[memoryview],
    block_bytes: int,
    move: Callable[[Sequence[bytes], Sequence[memoryview]], Awaitable[bytearray]],
    *,
    writable: bool,
) -> bytearray:
    """Move the objects whose views can hold them.

    Args:
        keys: of the batch.
        views: of the objects.
        block_bytes: bytes of an object.
        move: one outcome for each key that it is given.
        writable: whether the views are written.

    Returns:
        One outcome a key. REFUSED where the view is unfit.
    """
    unfit = unfit_views(views, len(keys), block_bytes, writable=writable)
    if not unfit:
        return await move(keys, views)
    fit = [i for i in range(len(keys)) if i not in unfit]
    outcomes = bytearray([Outcome.REFUSED]) * len(keys)
    if fit:
        moved = await move([keys[i] for i in fit], [views[i] for i in fit])
        for i, outcome in zip(fit, moved, strict=True):
            outcomes[i] = outcome
    return outcomes
