"""Granted leases, and the requests that wait for their loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvactors.actor import Envelope
from kvactors.errors import KVActorsError, LeaseEnded, NoRoom, ensure
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import LayerResult, ReadyResult
from kvactors.prefix_index.records import LeaseFault, LeaseState, LoadState

PREEMPTED = 65_536
"""Preempted requests that are recorded, the oldest dropped first: they are not counted again
when they come again."""

CHECKED = 256
"""Leases that a step of a check covers."""


class LeaseTable:
    """Granted leases by number.

    A granted lease is pending while loads of it are in flight, and `wait_ready` is answered after
    the last one. It can fail, which every later call raises, and it ends when it is removed. `get`
    finds it by its number, None once it has ended.

    Args:
        restarted: leases of an earlier incarnation were lost.

    Attributes:
        requests: leases granted.
        looked_up: full blocks of the prompts of leases whose loads have ended.
        resumed: leases of requests that were preempted before, which the other counts do not
            include.
        device_hits, host_hits, storage_hits: blocks found, by tier.
    """

    def __init__(self, index: BlockIndex, evictions: Evictions, *, restarted: bool) -> None:
        self.requests = self.looked_up = self.resumed = 0
        self.device_hits = self.host_hits = self.storage_hits = 0
        self._salts = index.policy.quotas.counts.rows  # empty without salts
        self._index = index
        self._evictions = evictions
        self._restarted = restarted
        self._leases: dict[int, LeaseState] = {}
        self.get = self._leases.get  # bound: every call of a lease begins with it
        self._preempted: dict[str, None] = {}  # request ids

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[LeaseState]:
        return iter(self._leases.values())

    def refusal(self, envelope: Envelope[Any]) -> Refusal:
        """The lease of a request has ended."""
        lost = (
            "it was lost when prefix_index was restarted: acquire again"
            if self._restarted
            else "it was finished, preempted or given back"
        )
        return Refusal(envelope, LeaseEnded(lost))

    # -- begin and end

    def grant(self, lease: LeaseState) -> list[Action]:
        """The lease has its blocks. Without loads it is ready."""
        self._enter(lease, lease.path.num_tokens)
        if lease.loads:
            return []
        actions = self._ready(lease)
        lease.expected_blocks = lease.path.num_committed
        return actions

    def begin(self, lease: LeaseState, tokens: int) -> None:
        """A lease of a prompt of so many tokens has its blocks, all hits of them on the device."""
        if self._preempted or self._salts:
            self._enter(lease, tokens)
            self._count_hits(lease)
            return
        self._leases[lease.id] = lease
        lease.granted, lease.prompt_tokens = True, tokens
        self.requests += 1
        self.looked_up += tokens // self._index.block_size
        self.device_hits += lease.device_hits

    def _enter(self, lease: LeaseState, tokens: int) -> None:
        self._leases[lease.id] = lease
        lease.granted, lease.prompt_tokens = True, tokens
        if self._preempted and lease.request_id in self._preempted:
            del self._preempted[lease.request_id]
            self.resumed += 1
            lease.counted = False
            return
        self.requests += 1
        if self._salts and (row := self._salts.get(lease.path.salt)) is not None:
            row.requests += 1

    def _count_hits(self, lease: LeaseState) -> None:
        """No load of the lease is in flight any more. Its look-ups count now, with their hits: the
        share of hits is at most 1 at any time."""
        if not lease.counted:
            return
        blocks = lease.prompt_tokens // self._index.block_size
        self.looked_up += blocks
        self.device_hits += lease.device_hits
        self.host_hits += lease.host_hits
        self.storage_hits += lease.storage_hits
        if self._salts and (row := self._salts.get(lease.path.salt)) is not None:
            row.looked_up += blocks
            row.device_hits += lease.device_hits
            row.host_hits += lease.host_hits
            row.storage_hits += lease.storage_hits

    def add_fork(self, fork: LeaseState) -> None:
        """A fork of a granted lease waits for the same loads."""
        self._leases[fork.id] = fork
        for load in fork.loads:
            load.sharers.append(fork)

    def remove(self, lease: LeaseState) -> list[Action]:
        """End a lease, granted or not: it waits for no load any more. Its blocks stay as they
        are."""
        self._leases.pop(lease.id, None)
        for load in lease.loads:
            if load.owner is lease:
                load.owner = None
            else:
                load.sharers.remove(lease)
        lease.loads.clear()
        if not (lease.ready or lease.layers):
            return []
        waiting = (*lease.ready, *(envelope for _, envelope in lease.layers))
        lease.ready.clear()
        lease.layers.clear()
        return [Refusal(envelope, LeaseEnded("it has ended")) for envelope in waiting]

    def end(self, lease: LeaseState) -> None:
        """End a lease for which nothing waits."""
        del self._leases[lease.id]

    def remember_preempted(self, request_id: str) -> None:
        """The request will be acquired again."""
        self._preempted[request_id] = None
        if len(self._preempted) > PREEMPTED:
            del self._preempted[next(iter(self._preempted))]

    def fail_all(self, kind: type[KVActorsError], reason: str) -> list[Action]:
        """No granted lease can be used any more."""
        actions: list[Action] = []
        for lease in self._leases.values():
            lease.fault = lease.fault or LeaseFault(kind, (reason,))
            waiting, lease.ready = lease.ready, []
            actions += [Refusal(envelope, lease.fault.error()) for envelope in waiting]
            actions += self.answer_layers(lease)
        return actions

    # -- waiting for loads

    def wait_ready(self, number: int, envelope: Envelope[ReadyResult]) -> list[Action]:
        """Answer once no load of a lease is in flight."""
        lease = self._leases.get(number)
        if lease is None:
            return [self.refusal(envelope)]
        if lease.loads and lease.fault is None:
            lease.ready.append(envelope)
            return []
        return [self._landed(lease, envelope)]

    def wait_layer(self, number: int, layer: int, envelope: Envelope[LayerResult]) -> list[Action]:
        """Answer once a layer has arrived for every load of a lease."""
        lease = self._leases.get(number)
        if lease is None:
            return [self.refusal(envelope)]
        lease.layers.append((layer, envelope))
        return self.answer_layers(lease)

    def answer_layers(self, lease: LeaseState) -> list[Action]:
        """Answer the requests whose layer has arrived."""
        if not lease.layers:
            return []
        arrived = min((load.layers for load in lease.loads), default=None)
        waiting, lease.layers = lease.layers, []
        actions: list[Action] = []
        for layer, envelope in waiting:
            if lease.fault is not None:
                actions.append(Refusal(envelope, lease.fault.error()))
            elif arrived is None or (layer < arrived and not self._computes_into_loads(lease)):
                cached = self._index.before_media(self._arriving(lease), lease.media)
                table = tuple(lease.path.table()) if lease.changed else None
                result = LayerResult(cached * self._index.block_size, table)
                actions.append(Reply(envelope, result))
            else:
                lease.layers.append((layer, envelope))
        return actions

    def load_ended(
        self, lease: LeaseState, load: LoadState, num_loaded: int, from_host: int, *, owner: bool
    ) -> list[Action]:
        """A load that the lease waited for has ended, or the lease continues without it.

        Args:
            lease: the owner of the load or a sharer.
            load: the load.
            num_loaded: leading blocks of it that are resident now.
            from_host: blocks of those that came from the host tier.
            owner: the target blocks belong to this lease. Any other lease gets new blocks in place
                of targets that were not loaded.
        """
        lease.loads.remove(load)
        before = lease.path.num_committed
        committed = lease.tree.settle(lease.path)
        host = max(0, min(committed, load.start + from_host) - before)
        lease.host_hits += host
        lease.storage_hits += committed - before - host
        actions: list[Action] = []
        if not owner:
            actions += self._replace_targets(lease, load, load.start + num_loaded)
        if not lease.loads and lease.granted:
            actions += self._ready(lease)
        return actions

    def _ready(self, lease: LeaseState) -> list[Action]:
        """No load of the lease is in flight any more."""
        actions = self._keep_media_whole(lease) if lease.media else []
        self._count_hits(lease)
        if lease.ready:
            waiting, lease.ready = lease.ready, []
            actions += [self._landed(lease, envelope) for envelope in waiting]
        return actions + self.answer_layers(lease) if lease.layers else actions

    def _landed(self, lease: LeaseState, envelope: Envelope[ReadyResult]) -> Action:
        """The answer to a request that waited for the loads of a lease."""
        if lease.fault is not None:
            return Refusal(envelope, lease.fault.error())
        hits = (lease.device_hits, lease.host_hits, lease.storage_hits)
        cached = sum(hits) * self._index.block_size
        return Reply(envelope, ReadyResult(tuple(lease.path.table()), cached, *hits))

    def _arriving(self, lease: LeaseState) -> int:
        """Leading blocks that are cached if everything completes that is arriving now."""
        run = lease.path.num_committed
        loads = sorted(lease.loads, key=lambda one: one.start)
        # A shared load may go on along another path: this lease's next one begins where they part.
        stops = [load.start for load in loads[1:]] + [lease.expected_blocks]
        for load, stop in zip(loads, stops, strict=False):
            if load.start > run:
                break
            run = max(run, min(load.start + load.arriving, stop))
        return min(run, lease.expected_blocks) if loads else run

    def _computes_into_loads(self, lease: LeaseState) -> bool:
        """Whether a request that continues after the blocks arriving now would compute into a block
        that a load in flight brings for others too. It is answered when the loads have ended."""
        run = self._arriving(lease)
        cached = self._index.before_media(run, lease.media)
        for load in lease.loads:
            if load.owner is lease:  # blocks that it does not bring stay the lease's
                if load.start <= run and cached < load.start + load.arriving:
                    return True
                continue
            first = max(cached, load.start)
            table = lease.path.blocks(first, max(first, min(load.stop, lease.path.num_blocks)))
            if not set(table).isdisjoint(load.blocks):
                return True
        return False

    # -- blocks in place of shared ones

    def _replace_targets(self, lease: LeaseState, load: LoadState, first: int) -> list[Action]:
        """Blocks that were not loaded have targets of another lease: this lease computes into new
        ones."""
        targets = set(load.blocks)
        last = min(load.stop, lease.path.num_blocks)
        positions = [
            p
            for p in range(max(first, lease.path.num_committed), last)
            if lease.path.blocks(p, p + 1)[0] in targets
        ]
        if positions:
            lease.expected_blocks = min(lease.expected_blocks, positions[0])
        return self._take_new_blocks(lease, positions)

    def _keep_media_whole(self, lease: LeaseState) -> list[Action]:
        """If the cached blocks end within a media item, the request computes all of the item, into
        blocks that are not shared."""
        committed = lease.path.num_committed
        kept = self._index.before_media(committed, lease.media)
        if kept == committed or lease.fault is not None:
            return []
        self._index.pool.give(lease.tree.retreat(lease.path, kept))
        lease.storage_hits -= (less := min(lease.storage_hits, excess := committed - kept))
        lease.host_hits -= (more := min(lease.host_hits, excess - less))
        lease.device_hits -= excess - less - more
        return self._take_new_blocks(lease, list(range(kept, committed)))

    def _take_new_blocks(self, lease: LeaseState, positions: list[int]) -> list[Action]:
        """Blocks to compute into at these positions. If there are none the lease fails."""
        index, actions = self._index, list[Action]()
        lease.changed |= bool(positions)
        if index.free < len(positions):
            actions = self._evictions.drop(len(positions) - index.free, lease.path.salt)
        if index.free < len(positions):
            lease.fault = lease.fault or LeaseFault(NoRoom, (len(positions), index.free))
            for position in positions:
                # The block belongs to the load: this lease must not give it back.
                lease.tree.replace(lease.path, position, -1)
            return actions
        for position, block in zip(positions, index.take(len(positions)), strict=True):
            lease.tree.replace(lease.path, position, block)
        return actions


def check_leases(leases: LeaseTable) -> Iterator[None]:
    """AssertionError if there are more hits than look-ups, or if a lease would compute into a block
    that other requests hit. In steps of some leases."""
    hits = leases.device_hits + leases.host_hits + leases.storage_hits
    ensure(hits <= leases.looked_up, f"{hits} hits of {leases.looked_up} blocks looked up")
    for number, lease in enumerate(list(leases), 1):
        path = lease.path
        if leases.get(lease.id) is lease and not (lease.loads or lease.fault):
            computed = range(path.num_committed, min(path.num_held, path.num_blocks))
            shared = any(map(path.is_shared, computed))
            ensure(not shared, f"lease {lease.id} computes into a block of the cache")
        if not number % CHECKED:
            yield
