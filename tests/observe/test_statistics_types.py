"""The records that `KVCache.statistics` returns declare their fields' types."""

from __future__ import annotations

import typing
from collections.abc import Iterator

from kvactors.data_plane.cuda.engine import CudaStatistics
from kvactors.observe.statistics import CacheStatistics

NAMES = {"CudaStatistics": CudaStatistics}


def fields(record: type, where: str) -> Iterator[tuple[str, object]]:
    """Every field of a record and of the records in it: its path and each type in its
    annotation."""
    for name, hint in typing.get_type_hints(record, localns=NAMES).items():
        for kind in parts(hint):
            yield f"{where}.{name}", kind
            if isinstance(kind, type) and hasattr(kind, "_fields"):
                yield from fields(kind, f"{where}.{name}")


def parts(hint: object) -> Iterator[object]:
    if isinstance(hint, str):
        hint = typing.ForwardRef(hint)
    if isinstance(hint, typing.ForwardRef):
        raise TypeError(f"{hint} is not resolved")
    yield hint
    for inner in typing.get_args(hint):
        yield from parts(inner)


def test_no_field_of_the_statistics_is_any():
    found = dict(fields(CacheStatistics, "CacheStatistics"))
    assert "CacheStatistics.copies.batches" in found
    assert "CacheStatistics.actors.channel.queued" in found
    assert [
        name for name, kind in fields(CacheStatistics, "CacheStatistics") if kind is typing.Any
    ] == []
