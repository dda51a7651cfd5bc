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

    A waiting block is not pinned: if it is evicted first, it is not written.

    Args:
        policy: `none`, `write_through` (once stored on the host), `write_through_selective` (once
            touched `min_hits` times), or `write_back` (ahead of eviction).
        min_hits: touches before a block is written.
        tier: the host tier.
        is_saved: whether storage holds a key.
    """

    def __init__(
        self, policy: str, min_hits: int, tier: HostTier, is_saved: Callable[[bytes], bool]
    ) -> None:
        self.policy = policy
        self.ahead = -(-tier.capacity // AHEAD)
        self._min_hits = min_hits
        self._tier = tier
        self._is_saved = is_saved
        self._waiting: dict[bytes, HostBlock] = {}
        self._touches: Counter[bytes] = Counter()
        self._unscanned = 0  # blocks that came since the last look at the next victims

    def __len__(self) -> int:
        return len(self._waiting)

    def on_stored(self, blocks: Sequence[HostBlock]) -> None:
        """Blocks came from the device."""
        self._unscanned += len(blocks)
        if self.policy == "write_through":
            self._add(blocks)

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

    def on_evicted(self, keys: Iterable[bytes]) -> None:
        """Keys left the host tier."""
        for key in keys:
            self._waiting.pop(key, None)
            self._touches.pop(key, None)

    def clear(self) -> None:
        """Every block left the host tier."""
        self._waiting.clear()
        self._touches.clear()

    def wants(self, key: bytes) -> bool:
        """Whether a key that is evicted now is lost, although the policy would have saved it."""
        return self.policy == "write_back" and not self._is_saved(key)

    def _add(self, blocks: Iterable[HostBlock]) -> None:
        for block in blocks:
            if not self._is_saved(block.hash):
                self._waiting[block.hash] = block

    def _scan(self) -> None:
        """Queue the next victims, if enough blocks came and there is little space left."""
        step = max(1, self.ahead // 4)
        if self.policy != "write_back" or self._unscanned < step:
            return
        if self._tier.capacity - self._tier.resident >= self.ahead:
            return
        self._unscanned = 0
        self._add(
            block
            for block in islice(self._tier.policy.candidates(), self.ahead)
            if not block.arriving
        )

    def take(self, most: int) -> list[HostBlock]:
        """Blocks to write now, at most so many. They are pinned."""
        self._scan()
        taken: list[HostBlock] = []
        while self._waiting and len(taken) < most:
            block = self._waiting.pop(next(iter(self._waiting)))
            if not block.dropped and not self._is_saved(block.hash):
                self._tier.pin(block)
                taken.append(block)
        return taken
