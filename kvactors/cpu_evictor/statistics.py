"""Statistics of the host tier."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvactors.cpu_evictor.slots import HostTier


class Counts(msgspec.Struct, eq=False):
    """Blocks since this incarnation began."""

    evicted: int = 0
    offloaded: int = 0
    loaded: int = 0
    fetched: int = 0  # from storage
    written: int = 0
    shed: int = 0  # not written to storage although due, for lack of slots
    copy_failures: int = 0
    write_failures: int = 0


class HostStatistics(NamedTuple):
    """The host tier at one moment. The fields from `evicted` on count blocks, see `Counts`.

    Attributes:
        slots: slots of the arena, those for blocks in transit included.
        resident: blocks that count against the capacity.
        capacity: resident blocks at most.
    """

    slots: int
    resident: int
    free_slots: int
    pinned: int
    capacity: int
    evicted: int
    offloaded: int
    loaded: int
    fetched: int
    written: int
    shed: int
    copy_failures: int
    write_failures: int


def host_statistics(host: HostTier, counts: Counts) -> HostStatistics:
    """Statistics of a host tier and of the blocks moved through it."""
    return HostStatistics(
        host.num_slots,
        host.resident,
        host.free,
        host.pinned,
        host.capacity,
        *msgspec.structs.astuple(counts),
    )
