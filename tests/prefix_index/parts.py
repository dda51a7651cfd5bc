"""Makes the objects of PrefixIndex for tests of one of them."""

from __future__ import annotations

from itertools import count

from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.lineages import LineageSource


def evictions(index: BlockIndex, *, offload: bool = False) -> Evictions:
    """Evictions without a sink and without lineages."""
    announcements = Announcements(index, enabled=False, whole=False)
    lineages = LineageSource(False, {}, lambda _: b"")
    return Evictions(index, announcements, lineages, count(1), offload=offload)


def lease_table(index: BlockIndex) -> LeaseTable:
    """The leases of a first incarnation."""
    return LeaseTable(index, evictions(index), restarted=False)
