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

    A waiting block is pinned for `keep_s` seconds. One that is evicted later, before its turn, is
    not written.

    Args:
        policy: `none`, `write_through` (once stored on the host), `write_through_selective` (once
            touched `min_hits` times), or `write_back` (ahead of eviction).
        min_hits: touches before a block is written.
        tier: the host tier.
        is_saved: whether storage holds a key.
        clock: the time of the pins.
        keep_s: 0 to pin no waiting block.
    """

    def __init__(
        self,
        policy: str,
        min_hits: int,
        tier: HostTier,
        is_saved: Callable[[bytes], bool],
        clock: Callable[[], float],
        keep_s: float,
    ) -> None:
        self.policy = policy
        self.ahead = -(-tier.capacity // AHEAD)
        self._min_hits = min_hits
        self._tier = tier
        self._is_saved = is_saved
        self._clock = clock
        self._keep_s = keep_s
        self._waiting: dict[bytes, HostBlock] = {}
        self._kept: dict[bytes, float] = {}  # waiting blocks that are pinned, and until when
        self._given_up: set[bytes] = set()  # blocks whose pin has ended, or whose write failed
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
        """The engine would store keys. Those that are on the host and were not saved get another
        chance."""
        if self.policy != "write_through" or not self._given_up:
            return
        for key in self._given_up.intersection(keys):
            self._given_up.discard(key)
            if key not in self._waiting:
                self._add([self._tier.blocks[key]])

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
            self._given_up.discard(key)
            self._touches.pop(key, None)
        return unsaved

    def on_ended(self, blocks: Iterable[HostBlock], ok: Iterable[bool]) -> None:
        """Writes have ended: unpin their blocks."""
        for block, saved in zip(blocks, ok, strict=False):
            self._tier.unpin(block)
            if block.dropped:  # by a reset: another block may have its key
                continue
            self._writing.discard(block.hash)
            if saved:
                self._given_up.discard(block.hash)
            else:
                self._given_up.add(block.hash)

    def clear(self) -> None:
        """Every block left the host tier."""
        for key in self._kept:
            self._tier.unpin(self._waiting[key])
        self._kept.clear()
        self._waiting.clear()
        self._given_up.clear()
        self._writing.clear()
        self._touches.clear()

    def _wants(self, key: bytes) -> bool:
        """Whether a block is to be saved before it is evicted."""
        if self.policy == "write_back":
            return not self._is_saved(key)
        return key in self._given_up and not self._is_saved(key)

    def keeps(self, block: HostBlock) -> bool:
        """Whether a block that is chosen to be evicted is saved first. It is pinned then."""
        if not self._keep_s or block.hash in self._given_up or not self._wants(block.hash):
            return False
        self._add([block])
        return True

    def _add(self, blocks: Iterable[HostBlock]) -> None:
        until = self._clock() + self._keep_s
        for block in blocks:
            key = block.hash
            if key in self._waiting or key in self._writing or self._is_saved(key):
                continue
            self._waiting[key] = block
            if self._keep_s and key not in self._given_up:
                self._tier.pin(block)
                self._kept[key] = until

    def expire(self) -> None:
        """Unpin the blocks that have waited for too long."""
        now = self._clock()
        while self._kept:
            key, until = next(iter(self._kept.items()))
            if until > now:
                return
            del self._kept[key]
            self._tier.unpin(self._waiting[key])
            self._given_up.add(key)

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
            if self._kept.pop(block.hash, None) is None:
                self._tier.pin(block)
            if self._is_saved(block.hash):
                self._tier.unpin(block)
                continue
            self._writing.add(block.hash)
            taken.append(block)
        return taken
