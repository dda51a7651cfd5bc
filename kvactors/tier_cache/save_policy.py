"""Which blocks of the host tier are written to storage, and when. Pure state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvactors.cpu_evictor.slots import HostBlock, HostTier

AHEAD = 8
"""One of so many host slots is saved ahead of its eviction, with write_back."""


class SaveQueue:
    """Blocks that wait to be written to storage.

    A waiting block is pinned until `release`. One that is evicted before its turn is not written.

    Args:
        policy: `none`, `write_through` (once stored on the host), `write_through_selective` (once
            touched `min_hits` times), or `write_back` (ahead of eviction).
        min_hits: touches before a block is written.
        tier: the host tier.
        is_saved: whether storage holds a key.
        pins: whether waiting blocks are pinned.
    """

    def __init__(
        self,
        policy: str,
        min_hits: int,
        tier: HostTier,
        is_saved: Callable[[bytes], bool],
        pins: bool,
    ) -> None:
        self.policy = policy
        self.ahead = -(-tier.capacity // AHEAD)
        self._min_hits = min_hits
        self._tier = tier
        self._is_saved = is_saved
        self._pins = pins
        self._behind = False  # pins were released, and the saves of then have not ended
        self._waiting: dict[bytes, HostBlock] = {}
        self._pinned: set[bytes] = set()  # waiting blocks
        self._failed: set[bytes] = set()  # blocks on the host whose write failed
        self._writing: set[bytes] = set()
        self._touches: Counter[bytes] = Counter()
        self._unscanned = 0  # blocks that came since the last look at the next victims

    def __len__(self) -> int:
        return len(self._waiting)

    def on_stored(self, blocks: Sequence[HostBlock]) -> None:
        """Blocks came from the device."""
        self._unscanned += len(blocks)
        if self.policy == "write_through":
            self._add(blocks)

    def on_offered(self, keys: Iterable[bytes]) -> None:
        """The engine would store keys: writes of blocks on the host that failed are tried again."""
        again = self._failed.intersection(keys) if self.policy == "write_through" else ()
        self._failed.difference_update(again)
        self._add([self._tier.blocks[key] for key in again])

    def on_touched(self, keys: Iterable[bytes]) -> None:
        """Keys were used."""
        if self.policy != "write_through_selective":
            return
        for key in keys:
            block = self._tier.readable(key)
            if block is None:
                continue
            self._touches[key] += 1
            if self._touches[key] >= self._min_hits:
                self._add([block])

    def on_evicted(self, keys: Iterable[bytes]) -> int:
        """Keys left the host tier. Returns how many of them the policy would have saved."""
        unsaved = 0
        for key in keys:
            queued = self._waiting.pop(key, None) is not None
            unsaved += queued or self._wants(key)
            self._failed.discard(key)
            self._touches.pop(key, None)
        return unsaved

    def on_ended(self, blocks: Iterable[HostBlock], ok: Iterable[bool]) -> None:
        """Writes have ended: unpin their blocks."""
        for block, saved in zip(blocks, ok, strict=False):
            self._tier.unpin(block)
            if block.dropped:  # by a reset: another block may have its key
                continue
            self._writing.discard(block.hash)
            if not saved:
                self._failed.add(block.hash)

    def clear(self) -> None:
        """Every block left the host tier."""
        self._unpin()
        self._waiting.clear()
        self._failed.clear()
        self._writing.clear()
        self._touches.clear()

    def _wants(self, key: bytes) -> bool:
        """Whether a block is to be saved before it is evicted."""
        if self.policy == "write_back":
            return not self._is_saved(key)
        return key in self._failed and not self._is_saved(key)

    def keeps(self, block: HostBlock) -> bool:
        """Whether a block that is chosen to be evicted is saved first. It is pinned then."""
        if self.policy != "write_back" or block.hash in self._failed or not self._pins_now():
            return False
        self._add([block])
        return block.hash in self._pinned

    def _add(self, blocks: Iterable[HostBlock]) -> None:
        pins = self._pins_now()
        for block in blocks:
            key = block.hash
            if key in self._waiting or key in self._writing or self._is_saved(key):
                continue
            self._waiting[key] = block
            if pins and key not in self._failed:
                self._tier.pin(block)
                self._pinned.add(key)

    def _pins_now(self) -> bool:
        self._behind = self._behind and bool(self._waiting or self._writing)
        return self._pins and not self._behind

    def release(self) -> bool:
        """Others have waited for slots for too long: unpin the waiting blocks, and pin none until
        the saves have caught up. Returns whether a block was pinned."""
        found = bool(self._pinned)
        self._unpin()
        self._behind = True
        return found

    def _unpin(self) -> None:
        for key in self._pinned:
            self._tier.unpin(self._waiting[key])
        self._pinned.clear()

    def _scan(self) -> None:
        """Queue the next victims, if enough blocks came and there is little space left."""
        step = max(1, self.ahead // 4)
        if self.policy != "write_back" or self._unscanned < step:
            return
        if self._tier.capacity - self._tier.resident >= self.ahead:
            return
        self._unscanned = 0
        victims = islice(self._tier.policy.candidates(), self.ahead)
        self._add([block for block in victims if not block.arriving])

    def take(self, most: int) -> list[HostBlock]:
        """Blocks to write now, at most so many. They are pinned until `on_ended`."""
        self._scan()
        taken: list[HostBlock] = []
        while self._waiting and len(taken) < most:
            block = self._waiting.pop(next(iter(self._waiting)))
            if block.hash not in self._pinned:
                self._tier.pin(block)
            self._pinned.discard(block.hash)
            if self._is_saved(block.hash):
                self._tier.unpin(block)
                continue
            self._writing.add(block.hash)
            taken.append(block)
        return taken
