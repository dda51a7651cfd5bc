"""Pinned paths: their blocks stay on the device, and in the host tier, until they are unpinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import PinHostBlocks, UnpinHostBlocks
from kvactors.identity import PLAIN, RequestScope
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.actions import Action, StartTimer, Timed
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import PinExpired
from kvactors.prefix_index.records import LeaseState
from kvactors.types import HASH_BYTES, hash_at

EARLY = 0.001
"""Seconds that a timer may be early, by the resolution of the clocks."""

AGAIN = 0.1
"""Seconds at least until a clock that stands still is looked at again."""


class Pin(Timed):
    """One pinned path.

    Attributes:
        number: of its timer.
        root: the root hash of its path.
        salt: see `kvactors.quotas.salt_id`.
        hashes: of its blocks, from the first on.
        tree, nodes: where its blocks are. Without nodes the device has lost them.
        expiry: time of the cache's clock from which it is over.
    """

    __slots__ = ("expiry", "hashes", "nodes", "number", "root", "salt", "tree")

    def __init__(
        self, number: int, path: Path, hashes: bytes, tree: BlockTree, nodes: NDArray[np.uint32]
    ) -> None:
        super().__init__()
        self.number = number
        self.root = path.root
        self.salt = path.salt
        self.hashes = hashes
        self.tree = tree
        self.nodes: NDArray[np.uint32] | None = nodes
        self.expiry = inf


class Pins:
    """Pins paths of finished requests, up to a share of the device.

    Args:
        share: of the device blocks, at most.
        scopes: the inputs of root hashes.
        root: the root hash of requests that are admitted now, by their scope.
        host: whether there is a host tier, whose copies of the blocks are pinned as well.

    Attributes:
        refused, expired: pins so far that were beyond the share, and that ended with their time.
    """

    def __init__(
        self,
        index: BlockIndex,
        share: float,
        scopes: Mapping[bytes, RequestScope],
        root: Callable[[RequestScope], bytes],
        *,
        host: bool,
    ) -> None:
        self.refused = self.expired = 0
        self._index = index
        self._share = share
        self._scopes = scopes
        self._root = root
        self._host = host
        self._numbers = count(1)
        self._pins: dict[bytes, Pin] = {}  # by the hash of the last block
        self._by_number: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def limit(self) -> int:
        """Device blocks that may be pinned."""
        return int(self._share * self._index.pool.total)

    @property
    def blocks(self) -> int:
        """Device blocks that are pinned."""
        return self._index.tree.pinned

    def withheld(self, path: Path, hits: int, deadline: float) -> int:
        """Device blocks that a request cannot have before a deadline: those that stay pinned until
        then, without those of the request's path.

        Args:
            path: of the request.
            hits: leading blocks of the path that the request may share.
            deadline: absolute loop time.
        """
        until = self._index.policy.now() + deadline - now()
        nodes, shared = [np.empty(0, np.uint32)], 0
        for pin in self._pins.values():
            if pin.nodes is None or pin.expiry - EARLY <= until:
                continue
            nodes.append(pin.nodes)
            for last in range(shared, min(hits, len(pin.nodes))):
                if path.hashes(last, last + 1) != hash_at(pin.hashes, last):
                    break
                shared = last + 1
        return len(np.unique(np.concatenate(nodes))) - shared

    def pin(self, lease: LeaseState) -> tuple[int, list[Action]]:
        """Pin the committed blocks of a lease that ends, as its hints ask.

        Returns:
            Blocks pinned, 0 if that was refused, and the actions.
        """
        path, hints = lease.path, lease.hints
        if hints is None or not hints.pin or lease.tree.retired:
            return 0, []
        blocks = path.num_committed
        if lease.pin_prompt:
            blocks = min(blocks, lease.prompt_tokens // self._index.block_size)
        if not blocks or lease.tree.is_forgotten(path):
            return 0, []
        if self._root(self._scopes.get(path.root, PLAIN)) != path.root:
            return 0, []  # the adapter was cleared: no request would find the blocks, or unpin them
        hashes = path.hashes(0, blocks)
        last = hashes[-32:]
        nodes = lease.tree.pin_blocks(path, blocks, self.limit)
        if nodes is None:
            self.refused += 1
            return 0, []
        actions = self._end(last)  # pinned again: only the time is new
        pin = Pin(next(self._numbers), path, hashes, lease.tree, nodes)
        self._pins[last] = pin
        self._by_number[pin.number] = last
        if hints.ttl is not None:
            pin.expiry = self._index.policy.now() + hints.ttl
            actions.append(self._timer(pin))
        if self._host:
            actions += [PinHostBlocks(run) for run in self._runs(hashes)]
        return blocks, actions

    def unpin(self, path: Path) -> tuple[int, list[Action]]:
        """End the pin of exactly these full blocks. Returns how many they are, 0 without a pin."""
        blocks = path.num_full_blocks
        last = path.hashes(blocks - 1, blocks) if blocks else b""
        if last not in self._pins:
            return 0, []
        return blocks, self._end(last)

    def expire(self, number: int) -> list[Action]:
        """The time of a pin is over on the loop's clock."""
        last = self._by_number.get(number)
        if last is None:
            return []
        pin = self._pins[last]
        if pin.expiry - self._index.policy.now() > EARLY:
            return [self._timer(pin, AGAIN)]  # the cache's clock is another one, and slower
        self.expired += 1
        return self._end(last)

    def end_all(self, chosen: Callable[[Pin], bool] = lambda _: True) -> list[Action]:
        """End every pin, or the chosen ones."""
        ended = [last for last, pin in self._pins.items() if chosen(pin)]
        return [action for last in ended for action in self._end(last)]

    def device_lost(self) -> None:
        """The device has lost its blocks: only copies in the host tier stay pinned."""
        for pin in self._pins.values():
            self._release(pin)

    def again(self) -> list[Action]:
        """Pin the blocks in a restarted host tier."""
        if not self._host:
            return []
        return [PinHostBlocks(run) for pin in self._pins.values() for run in self._runs(pin.hashes)]

    def hashes(self) -> Iterator[bytes]:
        """The joined hashes of each pinned path."""
        return (pin.hashes for pin in self._pins.values())

    def _timer(self, pin: Pin, least: float = 0.0) -> StartTimer:
        """Timers run on the loop's clock, and a time to live on the cache's."""
        left = max(pin.expiry - self._index.policy.now(), least)
        return StartTimer(pin, now() + left, PinExpired(pin.number))

    def _end(self, last: bytes) -> list[Action]:
        pin = self._pins.pop(last, None)
        if pin is None:
            return []
        del self._by_number[pin.number]
        pin.stop_timer()
        self._release(pin)
        return [UnpinHostBlocks(run) for run in self._runs(pin.hashes)] if self._host else []

    def _runs(self, hashes: bytes) -> Iterator[bytes]:
        """The hashes of a path in runs of a part: the host tier handles one of them in a turn."""
        size = self._index.part * HASH_BYTES
        return (hashes[start : start + size] for start in range(0, len(hashes), size))

    def _release(self, pin: Pin) -> None:
        if pin.nodes is not None:
            self._index.pool.give(pin.tree.unpin_blocks(pin.nodes))
            pin.nodes = None
