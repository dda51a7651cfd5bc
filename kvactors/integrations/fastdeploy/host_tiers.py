"""Host memory and storage below the device blocks, as the scheduler's thread uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import NamedTuple

from kvactors.actor.log import get_logger
from kvactors.integrations.fastdeploy.block_index import IndexedBlock
from kvactors.integrations.fastdeploy.rank_copies import RankCopies
from kvactors.tier_cache import Lookup, TierCache, TierEvent
from kvactors.types import Tier

log = get_logger()


class FoundBlocks(NamedTuple):
    """Blocks that can be loaded.

    Attributes:
        sources: HOST or STORAGE, for each.
        seconds: for which storage was waited for.
    """

    sources: list[Tier]
    seconds: float


class HostTiers:
    """Moves blocks between the device and a `TierCache`, and returns when they have moved.

    Calls come from different threads, never two at once: the engine's lock sees to it.

    Args:
        tiers: host slots and storage.
        copies: copies between device blocks and the slots of `tiers`.
        keeps: whether evicted device blocks are kept in host slots. If not, the slots are only for
            blocks on their way from storage.
        reads: whether blocks are read from storage.
        fetch_wait_s: seconds that a match waits for blocks from storage.
    """

    def __init__(
        self,
        tiers: TierCache,
        copies: RankCopies,
        *,
        keeps: bool,
        reads: bool,
        fetch_wait_s: float,
    ) -> None:
        self.tiers = tiers
        self.dropped = 0
        self._copies = copies
        self._keeps = keeps
        self._reads = reads
        self._fetch_wait_s = fetch_wait_s
        self._thread = 0

    def enter(self) -> None:
        """The calling thread makes the next calls."""
        if self._thread != get_ident():
            self.tiers.adopt()
            self._thread = get_ident()

    # -- eviction from the device

    def keep(self, victims: Sequence[IndexedBlock]) -> None:
        """Copy evicted blocks to host slots, and go on as saves to storage give slots back. Those
        nearest to the start of their paths come first: a block without its path cannot be matched.

        Args:
            victims: children before parents.

        Raises:
            DeviceError: a copy does not end. The blocks must not be used any more.
        """
        wanted = {block.hash: block for block in reversed(victims)} if self._keeps else {}
        keys, dropped = tuple(wanted), len(victims) - len(wanted)
        until = time.monotonic() + self.tiers.config.storage.on_full_wait_s
        while keys:
            parents = [
                None if (above := wanted[key].parent) is None else above.hash for key in keys
            ]
            found = self.tiers.prepare_store(keys, parents)
            keys = found.waiting
            dropped += len(found.refused)
            if found.keys:
                error = self._copies.store([wanted[key].block for key in found.keys], found.slots)
                self.tiers.complete_store(found.keys, success=not error)
                if error:
                    log.error("blocks not kept in host memory", blocks=len(found.keys), error=error)
                    dropped += len(found.keys)
            if time.monotonic() > until or not self.tiers.saving:  # loads end in other calls
                break
            self.tiers.end_step()
        self.dropped += dropped + len(keys)
        self.tiers.end_step()

    # -- hits

    def find(
        self, hashes: Sequence[bytes], waited_s: float, interrupted: Callable[[], bool]
    ) -> FoundBlocks:
        """The leading blocks of a path that can be loaded now: no more than there are host slots.

        Waits while blocks are on their way from storage. `end` ends the hold on them.

        Args:
            hashes: of the path.
            waited_s: seconds that the match has waited already.
            interrupted: whether to wait no longer.
        """
        hashes = hashes[: self.tiers.config.num_slots]
        begun = time.monotonic()
        waited = False
        while True:
            found, waits = self._look_up(hashes)
            now = time.monotonic()
            late = now - begun >= self._fetch_wait_s - waited_s
            if not waits or late or interrupted():
                sources = [self.tiers.source(one) for one in hashes[:found]]
                return FoundBlocks(sources, now - begun if waited else 0.0)
            waited = True
            self.tiers.end_step()  # begins fetches, and pauses

    def _look_up(self, hashes: Sequence[bytes]) -> tuple[int, bool]:
        """Leading blocks in host slots, and whether a later one is on its way there."""
        found, waits = 0, False
        for key in hashes:
            answer = self.tiers.lookup(key, storage=self._reads)
            if answer is Lookup.MISS:
                break
            waits = waits or answer is Lookup.PENDING
            found += not waits
        return found, waits

    def pin(self, hashes: Sequence[bytes]) -> list[int]:
        """The slots of blocks that `find` has found, until `load` has ended."""
        self.tiers.touch(hashes)
        return self.tiers.prepare_load(hashes)

    def load(self, hashes: Sequence[bytes], slots: Sequence[int], blocks: Sequence[int]) -> bool:
        """Copy pinned blocks to device blocks. Returns whether all bytes have arrived.

        Raises:
            DeviceError: the copy does not end. The blocks must not be used any more.
        """
        error = self._copies.load(blocks, slots)
        if error:
            log.error("blocks not loaded from host memory", blocks=len(blocks), error=error)
        self.unpin(hashes)
        return not error

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Loads have ended, or will not begin."""
        self.tiers.complete_load(hashes)

    def end(self) -> None:
        """A call of the engine ends: blocks that `find` has found may be evicted."""
        self.tiers.end_step()

    # -- the rest

    def events(self) -> list[TierEvent]:
        """Changes since the last call, for sinks."""
        return self.tiers.take_events()

    def reset(self) -> None:
        """Forget every block in host memory. Stored objects stay."""
        self.tiers.reset()

    def close(self) -> None:
        """End all moves and close storage, any number of times."""
        self.tiers.shutdown()
        self._copies.close()
