"""Granted leases, and the requests that wait for their loads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.actor import Envelope
from kvactors.actor.clock import now
from kvactors.errors import KVActorsError, LeaseEnded, NoRoom, NotReady, ensure
from kvactors.hints import Hints
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.messages import LayerReady, LayerResult, Ready, ReadyResult
from kvactors.prefix_index.work import Timed

if TYPE_CHECKING:
    from kvactors.prefix_index.actor import PrefixIndex


PREEMPTED_REQUESTS = 65_536
"""Preempted requests that are recorded, the oldest dropped first: they are not counted again
when they come again."""

CHECKED_LEASES = 256
"""Leases that a step of a check covers."""


LeaseFault: TypeAlias = partial[KVActorsError]
"""Makes the exception of each call of a lease that can no longer be used. A new one for each: one
that was raised keeps its frames alive, and with them the lease."""


class LeaseState(msgspec.Struct, eq=False):
    """A request's hold on its device blocks."""

    id: int
    request_id: str
    path: Path  # tokens, hashes, nodes and block table
    tree: BlockTree  # of its nodes, retired by a clear
    deadline: float
    media: tuple[tuple[int, int], ...] = ()  # see `Acquire`
    hints: Hints | None = None  # about the reuse of its blocks, None for none
    device_hits: int = 0
    expected_blocks: int = 0  # leading blocks that are cached if every load completes
    host_hits: int = 0
    storage_hits: int = 0
    loads: list[LoadState] = []  # those in flight that it waits for
    waits: list[tuple[float, Envelope[Any]]] = []  # (layer, request that waits for it)
    granted: bool = False  # it has its blocks. A lease that waits for them may have loads already.
    counted: bool = True  # the statistics count it, as they do unless it was preempted before
    fault: LeaseFault | None = None  # why it can no longer be used
    changed: bool = False  # its table has new blocks in place of blocks that were not loaded
    prompt_tokens: int = 0  # tokens that it was acquired with
    ready_at: float = 0.0  # of measurements of the engine, as the next one
    measured: int = 0  # blocks of its prompt that were cached, or have been measured
    output_tokens: int | None = None  # of the model, if its holder has given their number
    pin_prompt: bool = True  # a pin is of the blocks of its prompt only

    def output(self) -> int:
        """Tokens that the model has produced, -1 if that is not known."""
        if self.output_tokens is not None:
            return self.output_tokens
        return self.path.num_tokens - self.prompt_tokens or -1

    def fail(self, kind: type[KVActorsError], *arguments: Any) -> LeaseFault:
        """The lease can no longer be used. Returns why: it may have failed before."""
        self.fault = fault = self.fault or partial(kind, *arguments)
        return fault

    def not_ready(self, call: str) -> NotReady:
        return NotReady(
            f"lease of {self.request_id!r} waits for loads: await wait_ready() before {call}()"
        )


class LoadState(Timed, eq=False):
    """Consecutive blocks that are being loaded into device blocks of the owner. Other leases may
    share them. The load of the blocks above, its predecessor, must complete first: a block without
    its parent cannot be hit."""

    op: int
    owner: LeaseState | None  # the lease that took the target blocks, None once it has ended
    start: int  # positions of its blocks, the same on the path of every sharer
    stop: int
    predecessor: LoadState | None
    tree: BlockTree  # the owner's, which the load keeps, as its path
    path: Path
    # The targets, empty until the owner has them.
    nodes: NDArray[np.uint32] = msgspec.field(default_factory=lambda: np.empty(0, np.uint32))
    blocks: list[int] = msgspec.field(default_factory=list)
    sharers: list[LeaseState] = msgspec.field(default_factory=list)
    result: tuple[int, int] | None = None  # (blocks loaded, those of them from the host tier)
    completed: bool = False  # the result has been applied
    lost: bool = False  # overdue, and its leases continue without it
    layers: int = 0  # so many layers of the `arriving` leading blocks are on the device
    arriving: int = 0

    def leases(self) -> list[LeaseState]:
        """The leases that wait for it, the owner first."""
        return [*self.sharers] if self.owner is None else [self.owner, *self.sharers]

    def has(self, position: int, block: int) -> bool:
        """Whether it brings a device block for this position."""
        return self.start <= position < self.stop and self.blocks[position - self.start] == block

    def is_below_a_gap(self, lease: LeaseState) -> bool:
        """Whether a load above this one has failed. The lease computes all blocks from there on.
        Other requests can hit the blocks of this load if one of them has computed those above."""
        return lease.path.num_committed < self.start


class LeaseTable:
    """Granted leases by number, and their statistics (see `IndexStatistics`).

    A granted lease is pending while loads of it are in flight. It can fail, which every later call
    raises, and it ends when it is removed. `get` finds it by its number, None once it has ended.

    Attributes:
        prefilling: ready leases that lack whole blocks of their prompts, by number. Empty unless
            the engine is measured: a decode step looks at no lease for it.
    """

    def __init__(self, core: PrefixIndex) -> None:
        self.requests = self.looked_up = self.resumed = 0
        self.preempted = self.abandoned = self.forks = 0
        self.device_hits = self.host_hits = self.storage_hits = 0
        self._salts = core.index.policy.quotas.counts.rows  # empty without salts
        self._index, self._out = core.index, core.out
        self._evictions, self._prefill = core.evictions, core.prefill
        self._restarted = core.incarnation > 0
        self.prefilling: dict[int, LeaseState] = {}
        self._leases: dict[int, LeaseState] = {}
        self.get = self._leases.get  # bound: every call of a lease begins with it
        self._preempted: dict[str, None] = {}  # request ids

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[LeaseState]:
        return iter(self._leases.values())

    def find(self, number: int, envelope: Envelope[Any]) -> LeaseState | None:
        """The lease that a request is for. None if it has ended, and the request is refused. Most
        calls try `get` first, which costs least."""
        lease = self._leases.get(number)
        if lease is None:
            why = "it was finished, preempted or given back"
            if self._restarted:
                why = "it was lost when prefix_index was restarted: acquire again"
            self._out.refuse(envelope, LeaseEnded(why))
        return lease

    # -- begin and end

    def grant(self, lease: LeaseState) -> None:
        """The lease has its blocks. Without loads it is ready."""
        self._leases[lease.id] = lease
        lease.granted, lease.prompt_tokens = True, lease.path.num_tokens
        if self._preempted and lease.request_id in self._preempted:
            del self._preempted[lease.request_id]
            self.resumed += 1
            lease.counted = False
        else:
            self.requests += 1
            if self._salts and (row := self._salts.get(lease.path.salt)) is not None:
                row.requests += 1
        if not lease.loads:
            self._ready(lease)
            lease.expected_blocks = lease.path.num_committed

    def add_fork(self, fork: LeaseState) -> None:
        """A fork of a granted lease waits for the same loads."""
        self.forks += 1
        self._leases[fork.id] = fork
        for load in fork.loads:
            load.sharers.append(fork)

    def remove(self, lease: LeaseState) -> None:
        """End a lease, granted or not, without its blocks: it waits for no load any more."""
        self._leases.pop(lease.id, None)
        self.prefilling.pop(lease.id, None)
        if lease.loads:
            for load in lease.loads:
                if load.owner is lease:
                    load.owner = None
                else:
                    load.sharers.remove(lease)
            lease.loads.clear()
        if lease.waits:
            waits, lease.waits = lease.waits, []
            for _, envelope in waits:
                self._out.refuse(envelope, LeaseEnded("it has ended"))

    def remember_preempted(self, request_id: str) -> None:
        self.preempted += 1
        self._preempted[request_id] = None
        if len(self._preempted) > PREEMPTED_REQUESTS:
            del self._preempted[next(iter(self._preempted))]

    def fail_all(self, kind: type[KVActorsError], reason: str) -> None:
        """No granted lease can be used any more."""
        for lease in self._leases.values():
            lease.fail(kind, reason)
            self.answer_layers(lease)

    def measure(self, lease: LeaseState) -> None:
        """Measure the engine by the blocks that a prefilling lease has committed."""
        size = self._index.block_size
        blocks = lease.prompt_tokens // size
        done = min(lease.path.num_committed, blocks)
        if done > lease.measured:
            self._prefill.computed((done - lease.measured) * size, lease.ready_at, now())
            lease.measured = done
            if done == blocks:
                del self.prefilling[lease.id]

    # -- waiting for loads

    def wait(self, message: Ready | LayerReady, envelope: Envelope[Any]) -> None:
        """Answer once a layer, or everything, has arrived for every load of a lease."""
        lease = self.find(message.lease, envelope)
        if lease is not None:
            layer = message.layer if isinstance(message, LayerReady) else inf
            lease.waits.append((layer, envelope))
            self.answer_layers(lease)

    def answer_layers(self, lease: LeaseState) -> None:
        if not lease.waits:
            return
        arrived = min((load.layers for load in lease.loads), default=None)
        waits, lease.waits = lease.waits, []
        for layer, envelope in waits:
            if lease.fault is not None:
                self._out.refuse(envelope, lease.fault())
            elif arrived is None or (layer < arrived and not self._computes_into_loads(lease)):
                self._out.reply(envelope, self._arrived(lease, layer))
            else:
                lease.waits.append((layer, envelope))

    def _arrived(self, lease: LeaseState, layer: float) -> ReadyResult | LayerResult:
        if layer == inf:
            return self.result(lease)
        cached = self._index.before_media(self._arriving(lease), lease.media)
        table = tuple(lease.path.table()) if lease.changed else None
        return LayerResult(cached * self._index.block_size, table)

    def result(self, lease: LeaseState) -> ReadyResult:
        """Final unless loads of the lease are in flight."""
        hits = (lease.device_hits, lease.host_hits, lease.storage_hits)
        cached = sum(hits)
        if lease.loads:
            cached = self._index.before_media(lease.expected_blocks, lease.media)
        return ReadyResult(tuple(lease.path.table()), cached * self._index.block_size, *hits)

    def load_ended(
        self, lease: LeaseState, load: LoadState, num_loaded: int, from_host: int, *, owner: bool
    ) -> None:
        """A load that the lease waited for has ended, or the lease continues without it.
        `num_loaded` leading blocks of it are resident now, `from_host` of them from the host tier.
        owner: the target blocks belong to this lease. Any other lease gets new blocks in place of
        targets that were not loaded."""
        lease.loads.remove(load)
        before = lease.path.num_committed
        committed = lease.tree.settle(lease.path)
        host = max(0, min(committed, load.start + from_host) - before)
        lease.host_hits += host
        lease.storage_hits += committed - before - host
        if not owner:
            self._replace_targets(lease, load, load.start + num_loaded)
        if not lease.loads and lease.granted:
            self._ready(lease)

    def _ready(self, lease: LeaseState) -> None:
        """No load of the lease is in flight any more. Its look-ups count with their hits only now:
        the share of hits is at most 1 at any time."""
        if lease.media:
            self._keep_media_whole(lease)
        blocks, cached = lease.prompt_tokens // self._index.block_size, lease.path.num_committed
        if cached < blocks and self._prefill.measures:
            self.prefilling[lease.id] = lease
            lease.ready_at, lease.measured = now(), cached
        if lease.counted:
            salted = self._salts.get(lease.path.salt) if self._salts else None
            for row in (self,) if salted is None else (self, salted):
                row.looked_up += blocks
                row.device_hits += lease.device_hits
                row.host_hits += lease.host_hits
                row.storage_hits += lease.storage_hits
        if lease.waits:
            self.answer_layers(lease)

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

    def _replace_targets(self, lease: LeaseState, load: LoadState, first: int) -> None:
        """In place of another lease's targets that were not loaded, take new blocks."""
        targets = set(load.blocks)
        last = min(load.stop, lease.path.num_blocks)
        positions = [
            p
            for p in range(max(first, lease.path.num_committed), last)
            if lease.path.blocks(p, p + 1)[0] in targets
        ]
        if positions:
            lease.expected_blocks = min(lease.expected_blocks, positions[0])
        self._take_new_blocks(lease, positions)

    def _keep_media_whole(self, lease: LeaseState) -> None:
        """If the cached blocks end within a media item, all of it is computed, into new blocks."""
        committed = lease.path.num_committed
        kept = self._index.before_media(committed, lease.media)
        if kept == committed or lease.fault is not None:
            return
        self._index.pool.give(lease.tree.retreat(lease.path, kept))
        lease.storage_hits -= (less := min(lease.storage_hits, excess := committed - kept))
        lease.host_hits -= (more := min(lease.host_hits, excess - less))
        lease.device_hits -= excess - less - more
        self._take_new_blocks(lease, list(range(kept, committed)))

    def _take_new_blocks(self, lease: LeaseState, positions: list[int]) -> None:
        """Blocks to compute into at these positions. If there are none the lease fails."""
        index = self._index
        lease.changed |= bool(positions)
        self._evictions.drop_until(len(positions), lease.path.salt)
        if index.free < len(positions):
            lease.fail(NoRoom, len(positions), index.free)
            for position in positions:
                # The block belongs to the load: this lease must not give it back.
                lease.tree.replace(lease.path, position, -1)
            return
        for position, block in zip(positions, index.take(len(positions)), strict=True):
            lease.tree.replace(lease.path, position, block)

    def check_steps(self) -> Iterator[None]:
        """AssertionError if there are more hits than look-ups, or if a lease would compute into a
        block that other requests hit."""
        hits = self.device_hits + self.host_hits + self.storage_hits
        ensure(hits <= self.looked_up, f"{hits} hits of {self.looked_up} blocks looked up")
        for number, lease in enumerate(list(self), 1):
            path = lease.path
            if self.get(lease.id) is lease and not (lease.loads or lease.fault):
                computed = range(path.num_committed, min(path.num_held, path.num_blocks))
                shared = any(map(path.is_shared, computed))
                ensure(not shared, f"lease {lease.id} computes into a block of the cache")
            if not number % CHECKED_LEASES:
                yield
