"""A watch of every choice of victims and of every grant: the rules of quotas, times to live,
priorities, pins and clears of a salt, stated apart from the code that keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from kvactors.cpu_evictor.slots import NOTHING, HostBlock, HostTier, SlotState
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.leases import LeaseState
from kvactors.prefix_index.tree import BlockIndex
from kvactors.quotas import salt_id
from kvactors.storage.catalog import NONE, BatchAdmission, Catalog

Fail = Callable[[str], None]


class ShareWatch:
    """Looks at the blocks before and after each choice, and at those that are granted.

    Args:
        fail: called with a text for each broken rule.
        seen: counts of evictions.
    """

    def __init__(self, fail: Fail, seen: Counter[str]) -> None:
        self._fail = fail
        self._seen = seen

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch within a block. One watch a process at a time."""
        evict, victims = BlockIndex.evict, HostTier.victims

        def on_device(index: Any, count: int, op: int, salt: int = 0, incoming: int = 0) -> Any:
            owners = index.tree.owners() if index.tree.sharing else {}
            found = evict(index, count, op, salt, incoming)
            now = index.policy.now()
            if found.traits is not None:
                self._device(index, owners, found.traits, (salt, incoming), now)
            return found

        def on_host(
            tier: HostTier,
            count: int,
            protected: Iterable[bytes] = (),
            incoming: Mapping[int, int] = NOTHING,
        ) -> list[HostBlock]:
            spare, now = set(protected), tier.shares._clock()
            found = victims(tier, count, spare, incoming)
            times = now, tier.shares._clock()
            self._host(tier, count, spare, incoming, found, times)
            return found

        admit = Catalog.admit

        def on_store(
            catalog: Catalog, keys: Sequence[bytes], salts: Mapping[bytes, int | None] = NONE
        ) -> BatchAdmission:
            held = {key: catalog.salt(key) for key in catalog}
            found = admit(catalog, keys, salts)
            self._store(catalog, held, found)
            return found

        granted = PrefixIndex._granted

        def on_granted(index: PrefixIndex, lease: LeaseState, *arguments: Any) -> Any:
            if lease.device_hits and lease.tree.is_forgotten(lease.path):
                self._fail("a request was granted blocks of a salt that were cleared before")
            return granted(index, lease, *arguments)

        PrefixIndex._granted = on_granted  # type: ignore[assignment, method-assign]
        BlockIndex.evict = on_device  # type: ignore[assignment, method-assign]
        HostTier.victims = on_host  # type: ignore[assignment, method-assign]
        Catalog.admit = on_store  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            BlockIndex.evict, HostTier.victims = evict, victims  # type: ignore[method-assign]
            Catalog.admit, PrefixIndex._granted = admit, granted  # type: ignore[method-assign]

    def _store(
        self, catalog: Catalog, salts: Mapping[bytes, int | None], found: BatchAdmission
    ) -> None:
        """While a salt is above its quota, no victim is of a salt that is not, or would not be with
        it."""
        quotas = catalog.shares.quotas

        def quota(salt: int) -> float:
            blocks = quotas.get(salt)
            return inf if blocks is None else blocks

        left = Counter(salt for key in catalog if (salt := catalog.salt(key)) is not None)
        victims = [salts[key] for key in found.evicted]
        self._seen["store evictions watched"] += len(victims)
        if any(held > quota(salt) for salt, held in left.items()):
            self._seen["store evictions by a quota"] += len(victims)
            if any(salt is None or left[salt] < quota(salt) for salt in victims):
                self._fail("store: a block left before those of a salt above its quota")
        if any(key in catalog for key in (*found.evicted, *found.refused)):
            self._fail("store: a block that left is in the store")

    def _device(
        self, index: Any, owners: dict[int, Any], traits: Any, demand: tuple[int, int], now: float
    ) -> None:
        quotas = index.policy.quotas
        named = {salt_id(salt): quota.device for salt, quota in quotas}

        def quota(salt: int) -> float:
            blocks = named.get(salt, quotas.default.device)
            return inf if blocks is None else blocks

        held = Counter({salt: counts[0] for salt, counts in owners.items()})
        left = Counter({salt: counts[1] for salt, counts in owners.items()})
        own, incoming = demand
        for salt, expiry in zip(traits.salts, traits.expiries, strict=True):
            self._seen["evictions watched"] += 1
            if left[own] and held[own] + incoming > quota(own):
                above = {own}
            else:
                above = {one for one in left if left[one] and held[one] > quota(one)}
            if expiry > now and above:
                self._seen["evictions by a quota"] += 1
                if salt not in above:
                    self._fail("device: a block left before those of a salt above its quota")
            held[salt] -= 1
            left[salt] -= 1

    def _host(
        self,
        tier: HostTier,
        count: int,
        spare: set[bytes],
        incoming: Mapping[int, int],
        found: list[HostBlock],
        times: tuple[float, float],
    ) -> None:
        shares = tier.shares
        resident = {
            key: block for key, block in tier.blocks.items() if block.state is SlotState.RESIDENT
        }
        held = Counter(block.salt for block in resident.values())
        held.update(incoming)
        children = Counter(block.parent for block in resident.values())

        def allowed() -> list[HostBlock]:
            return [
                block
                for key, block in resident.items()
                if not (block.pins or key in spare or key in shares._pinned or children[key])
            ]

        if shares.pinned > shares._pin_limit:
            self._fail("host: more pinned blocks than the share")
        for victim in found:
            self._seen["host evictions watched"] += 1
            free = allowed()
            if victim not in free:
                self._fail("host: a block left that is pinned, in use or has children")
                return
            if not victim.expiry <= times[1]:
                self._choice(tier, victim, free, held, times[0])
            del resident[victim.hash]
            children[victim.parent] -= 1
            held[victim.salt] -= 1
        if len(found) < count and allowed():
            self._fail("host: fewer blocks left than could have")

    def _choice(
        self,
        tier: HostTier,
        victim: HostBlock,
        free: list[HostBlock],
        held: Counter[int],
        now: float,
    ) -> None:
        """Of the blocks that may leave, a block whose time is not over was chosen."""
        shares = tier.shares
        if any(block.expiry <= now for block in free):
            self._fail("host: a block left before one whose time is over")
            return
        above = [block for block in free if held[block.salt] > shares.quota(block.salt)]
        if above:
            self._seen["host evictions by a quota"] += 1
            if victim not in above:
                self._fail("host: a block left before those of a salt above its quota")
        elif victim.priority > min(block.priority for block in free):
            self._fail("host: a block left before one of a lower priority")
