"""Memory of one object: a view, or several that follow one another (a scatter list)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

ObjectViews: TypeAlias = "memoryview | Sequence[memoryview]"
"""A contiguous view of bytes, or several views, in the order of the object's bytes."""


class ObjectMemory:
    """The memory of one object as one contiguous view.

    Args:
        region: where the object's bytes are.
        block_bytes: bytes of an object.
        writable: whether the memory will be written.

    Attributes:
        view: contiguous bytes. Of a scatter list it is a copy, or new memory if `writable`.

    Raises:
        ValueError: the region has another size, is not contiguous, or cannot be written.
    """

    def __init__(self, region: ObjectViews, block_bytes: int, *, writable: bool) -> None:
        parts = [region] if isinstance(region, memoryview) else list(region)
        self._parts = [_flat(part, writable) for part in parts]
        size = sum(part.nbytes for part in self._parts)
        if size != block_bytes:
            raise ValueError(f"memory of {size} bytes for an object of {block_bytes}")
        if len(self._parts) == 1:
            self.view = self._parts[0]
        else:
            self.view = memoryview(bytearray(block_bytes))
            if not writable:
                self._copy(to_parts=False)

    def scatter(self) -> None:
        """The object's bytes are in `view`: copy them to the views of a scatter list."""
        if len(self._parts) > 1:
            self._copy(to_parts=True)

    def _copy(self, *, to_parts: bool) -> None:
        start = 0
        for part in self._parts:
            whole = self.view[start : start + part.nbytes]
            if to_parts:
                part[:] = whole
            else:
                whole[:] = part
            start += part.nbytes


def _flat(part: object, writable: bool) -> memoryview:
    view = memoryview(part)  # type: ignore[arg-type]
    if not view.contiguous or (writable and view.readonly):
        raise ValueError("the memory of an object must be contiguous, and writable for a load")
    return view.cast("B") if view.nbytes else memoryview(b"")
