"""Statistics of the host tier."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvactors.cpu_evictor.slots import HostTier
from kvactors.device.arena import HostSlots
from kvactors.storage.messages import Outcome


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
    not_stored_refused: int = 0  # the reasons of `write_failures`
    not_stored_no_space: int = 0
    not_stored_unavailable: int = 0
    not_stored_late: int = 0
    not_fetched_late: int = 0  # stored when a request asked for them, and it did not get them
    not_fetched_gone: int = 0
    not_fetched_failed: int = 0
    not_fetched_few: int = 0
    not_fetched_cleared: int = 0
    not_fetched_no_slot: int = 0

    def count_written(self, outcome: int) -> None:
        """The store answered for a block."""
        if outcome in (Outcome.OK, Outcome.EXISTS):
            self.written += 1
            return
        self.write_failures += 1
        if outcome == Outcome.REFUSED:
            self.not_stored_refused += 1
        elif outcome == Outcome.NO_SPACE:
            self.not_stored_no_space += 1
        elif outcome == Outcome.LATE:
            self.not_stored_late += 1
        else:
            self.not_stored_unavailable += 1

    def count_not_fetched(self, reason: str, blocks: int) -> None:
        """Stored blocks of a load did not come."""
        name = f"not_fetched_{reason}"
        setattr(self, name, getattr(self, name) + blocks)


class HostStatistics(NamedTuple):
    """The host tier at one moment. The fields from `evicted` on count blocks, see `Counts`.

    Attributes:
        slots: slots of the arena, those for blocks in transit included.
        resident: blocks that count against the capacity.
        free_slots: slots without a block.
        pinned: slots that a transfer uses.
        capacity: resident blocks at most.
        small_pages: why the slots are in pages of 4 KiB, which makes direct I/O and the device's
            copies slower. Empty if they are in huge pages.
        evicted: blocks that left the tier for others.
        offloaded: blocks that arrived from the device.
        loaded: blocks that were copied to the device.
        fetched: blocks that were read from storage.
        written: blocks that were written to storage.
        shed: blocks that were due and not written to storage, for lack of slots.
        not_stored_refused: blocks of `write_failures` that a quota or the capacity of the store
            refused.
        not_stored_no_space: such blocks that found no space.
        not_stored_unavailable: such blocks whose write failed, or was not made during a pause.
        not_stored_late: such blocks whose write did not begin before its deadline or a clear.
        not_fetched_late: blocks that storage had when a request asked for them, and that did not
            come before its deadline.
        not_fetched_gone: such blocks that the store had evicted since, or that were damaged.
        not_fetched_failed: such blocks whose read or copy failed.
        not_fetched_few: such blocks that were fewer than `storage.min_fetch_blocks`.
        not_fetched_cleared: such blocks of a cache that was cleared.
        not_fetched_no_slot: such blocks while every slot was in use and none about to come back.
        copy_failures: blocks whose copy between device and host failed.
        write_failures: blocks that the store did not take.
        quota_evictions: evicted blocks that were chosen because their salt was above its quota.
        pins_refused: pinned paths beyond the share of pinned blocks.
        pinned_blocks: blocks that are pinned, resident or not.
    """

    slots: int
    resident: int
    free_slots: int
    pinned: int
    capacity: int
    small_pages: str
    evicted: int
    offloaded: int
    loaded: int
    fetched: int
    written: int
    shed: int
    copy_failures: int
    write_failures: int
    not_stored_refused: int
    not_stored_no_space: int
    not_stored_unavailable: int
    not_stored_late: int
    not_fetched_late: int
    not_fetched_gone: int
    not_fetched_failed: int
    not_fetched_few: int
    not_fetched_cleared: int
    not_fetched_no_slot: int
    quota_evictions: int
    pins_refused: int
    pinned_blocks: int


NOT_STORED = tuple(name for name in HostStatistics._fields if name.startswith("not_stored_"))
"""Counts of blocks that the store did not take, by reason. Blocks for which no slot was free are
`shed`."""

NOT_FETCHED = tuple(name for name in HostStatistics._fields if name.startswith("not_fetched_"))
"""Counts of stored blocks that requests did not get, by reason."""


def host_statistics(host: HostTier, counts: Counts, arena: HostSlots) -> HostStatistics:
    """Statistics of a host tier, of the blocks moved through it, and of its memory."""
    return HostStatistics(
        slots=host.num_slots,
        resident=host.resident,
        free_slots=host.free,
        pinned=host.pinned,
        capacity=host.capacity,
        quota_evictions=host.shares.quota_evictions,
        pins_refused=host.shares.pins_refused,
        pinned_blocks=host.shares.pinned,
        small_pages=arena.small_pages,
        **msgspec.structs.asdict(counts),
    )
