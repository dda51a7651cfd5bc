"""Pinned paths: their blocks stay on the device, and in the host tier, until they are unpinned."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvactors.actor import Control
from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import PinHostBlocks, UnpinHostBlocks
from kvactors.identity import PLAIN
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.leases import LeaseState
from kvactors.prefix_index.work import Timed
from kvactors.types import HASH_BYTES, hash_at

if TYPE_CHECKING:
    from kvactors.prefix_index.actor import PrefixIndex


EARLY_TIMER_S = 0.001
"""Seconds that a timer may be early, by the resolution of the clocks."""

STOPPED_CLOCK_S = 0.1
"""Seconds at least until a clock that stands still is looked at again."""


class Pin(Timed, eq=False):
    """One pinned path."""

    root: bytes
    salt: int
    hashes: bytes
    tree: BlockTree
    nodes: NDArray[np.uint32] | None  # None: the device has lost them
    expiry: float = inf  # on the cache's clock


class PinExpired(Control, frozen=True, eq=False):
    """To itself: the time of a pin is over."""

    pin: Pin


class Pins:
    """Pins paths of finished requests, up to a share of the device. Their copies in the host tier
    are pinned as well."""

    def __init__(self, core: PrefixIndex) -> None:
        self.refused = self.expired = 0  # refused: beyond the share
        self._index, self._out, self._roots = core.index, core.out, core.roots
        self._settings, self._scopes = core.settings, core.announcements.scopes
        self._pins: dict[bytes, Pin] = {}  # by the hash of the last block

    def __len__(self) -> int:
        return len(self._pins)

    def withheld(self, path: Path, hits: int, deadline: float) -> int:
        """Device blocks that stay pinned until a deadline, without the `hits` leading blocks of its
        path that a request may share."""
        until = self._index.policy.now() + deadline - now()
        nodes, shared = [np.empty(0, np.uint32)], 0
        for pin in self._pins.values():
            if pin.nodes is None or pin.expiry - EARLY_TIMER_S <= until:
                continue
            nodes.append(pin.nodes)
            for last in range(shared, min(hits, len(pin.nodes))):
                if path.hashes(last, last + 1) != hash_at(pin.hashes, last):
                    break
                shared = last + 1
        return len(np.unique(np.concatenate(nodes))) - shared

    def pin(self, lease: LeaseState) -> int:
        """Pin the committed blocks of a lease that ends, as its hints ask. Returns their number, 0
        if that was refused."""
        path, hints = lease.path, lease.hints
        if hints is None or not hints.pin or lease.tree.retired:
            return 0
        blocks = path.num_committed
        if lease.pin_prompt:
            blocks = min(blocks, lease.prompt_tokens // self._index.block_size)
        if not blocks or lease.tree.is_forgotten(path):
            return 0
        if self._roots.root(self._scopes.get(path.root, PLAIN)) != path.root:
            return 0  # the adapter was cleared: no request would find the blocks, or unpin them
        hashes = path.hashes(0, blocks)
        last = hashes[-HASH_BYTES:]
        limit = int(self._settings.pin_share * self._index.pool.total)
        nodes = lease.tree.pin_blocks(path, blocks, limit)
        if nodes is None:
            self.refused += 1
            return 0
        self._end(last)  # pinned again: only the time is new
        pin = Pin(path.root, path.salt, hashes, lease.tree, nodes)
        self._pins[last] = pin
        if hints.ttl is not None:
            pin.expiry = self._index.policy.now() + hints.ttl
            self._start_timer(pin)
        self._tell_host(pin, PinHostBlocks)
        return blocks

    def unpin(self, path: Path) -> int:
        """End the pin of exactly these full blocks. Returns how many they are, 0 without a pin."""
        blocks = path.num_full_blocks
        last = path.hashes(blocks - 1, blocks) if blocks else b""
        return blocks if self._end(last) else 0

    def expire(self, pin: Pin) -> None:
        """The time of a pin is over on the loop's clock."""
        last = pin.hashes[-HASH_BYTES:]
        if self._pins.get(last) is not pin:
            return
        if pin.expiry - self._index.policy.now() > EARLY_TIMER_S:
            # The cache's clock is another one, and slower.
            self._start_timer(pin, STOPPED_CLOCK_S)
        else:
            self.expired += 1
            self._end(last)

    def end_all(self, chosen: Callable[[Pin], bool] = lambda _: True) -> None:
        for last in [last for last, pin in self._pins.items() if chosen(pin)]:
            self._end(last)

    def device_lost(self) -> None:
        """The device has lost its blocks: only copies in the host tier stay pinned."""
        for pin in self._pins.values():
            self._release(pin)

    def again(self) -> None:
        for pin in self._pins.values():
            self._tell_host(pin, PinHostBlocks)

    def _start_timer(self, pin: Pin, least: float = 0.0) -> None:
        """Timers run on the loop's clock, and a time to live on the cache's."""
        left = max(pin.expiry - self._index.policy.now(), least)
        self._out.at(pin, now() + left, PinExpired(pin))

    def _end(self, last: bytes) -> bool:
        pin = self._pins.pop(last, None)
        if pin is None:
            return False
        pin.stop_timer()
        self._release(pin)
        self._tell_host(pin, UnpinHostBlocks)
        return True

    def _tell_host(self, pin: Pin, kind: type[PinHostBlocks | UnpinHostBlocks]) -> None:
        """Sends the hashes in runs: the host tier handles one of them in a turn."""
        size = self._index.turn_blocks * HASH_BYTES
        for start in range(0, len(pin.hashes) if self._settings.host_tier else 0, size):
            self._out.to_evictor(kind(pin.hashes[start : start + size]))

    def _release(self, pin: Pin) -> None:
        if pin.nodes is not None:
            self._index.pool.give(pin.tree.unpin_blocks(pin.nodes))
            pin.nodes = None
