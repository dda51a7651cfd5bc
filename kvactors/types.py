"""Types and helpers that all packages share: tiers, residency, reasons, block hashes in buffers."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable
from enum import Enum, IntFlag
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HASH_BYTES = 32
"""Bytes in a block hash (SHA-256)."""

MIN_PRIORITY = -2
"""The priority of blocks that leave first."""

MAX_PRIORITY = 2
"""The priority of blocks that leave last."""

Tokens: TypeAlias = (
    "list[int] | tuple[int, ...] | array[int] | memoryview | NDArray[np.integer[Any]]"
)
"""Token ids, each in [0, 2**32): a list or tuple of integers, or a one-dimensional buffer of any
integer type."""


class Tier(IntFlag):
    """Where a block's bytes can be. A flag, so that a set of tiers is one small int."""

    DEVICE = 1
    HOST = 2
    STORAGE = 4


ALL_TIERS = Tier.DEVICE | Tier.HOST | Tier.STORAGE


class Residency(Enum):
    """The state that a flush task reports for its blocks. Always explicit, without a default."""

    RESIDENT = "resident"
    GONE = "gone"


class Reason(Enum):
    """Why a block's residency changed."""

    COMMIT = "commit"  # computed by a request
    LOAD = "load"  # came back from a lower tier
    OFFLOAD = "offload"  # copied to the host tier
    REQUEST_FINISH = "request_finish"
    CPU_EVICTION = "cpu_eviction"
    DEVICE_EVICTION = "device_eviction"  # left the device for the host tier
    DEVICE_DROP = "device_drop"  # left the device and is not kept on the host
    PROMOTION = "promotion"  # left an exclusive host or storage tier because a faster one holds it
    STORED = "stored"
    STORAGE_EVICTION = "storage_eviction"
    CORRUPT = "corrupt"
    CLEAR = "clear"
    NAMESPACE = (
        "namespace"  # the cache's namespace changed: requests cannot get it any more, or can again
    )
    RESTART = "restart"


def split_hashes(hashes: bytes) -> list[bytes]:
    """The block hashes in a buffer of block hashes."""
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


def hash_at(hashes: bytes, index: int) -> bytes:
    """One block hash of a buffer of them."""
    return hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]


def join_hashes(hashes: Iterable[bytes]) -> bytes:
    """A buffer of block hashes, one after another."""
    return b"".join(hashes)


def count_hashes(hashes: bytes) -> int:
    """The number of block hashes in a buffer. Raises ValueError for a part of one."""
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"{len(hashes)} bytes are no whole number of block hashes")
    return len(hashes) // HASH_BYTES


def indices_of(report: Any, pairs: int) -> frozenset[int]:
    """The indices that a report lists. All indices below `pairs` if the report is invalid."""
    try:
        indices = frozenset(operator.index(index) for index in report)
    except TypeError:
        return frozenset(range(pairs))
    return indices if all(0 <= index < pairs for index in indices) else frozenset(range(pairs))
