"""Requests before they have a lease: held during a pause, admitted at once, or in parts."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvactors.actor import Envelope
from kvactors.cpu_evictor.messages import PrefetchToHost
from kvactors.errors import (
    CacheAsleep,
    DeadlineExceeded,
    LeaseEnded,
    NoRoom,
    NumBlocksUnset,
    Paused,
)
from kvactors.native import HOST
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.admission import STEPS, Admission
from kvactors.prefix_index.forks import Forks
from kvactors.prefix_index.grants import Grants
from kvactors.prefix_index.held import Held, HeldRequests
from kvactors.prefix_index.host_victims import HostVictims
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.lineages import LineageSource
from kvactors.prefix_index.long_requests import LongRequests
from kvactors.prefix_index.messages import (
    Ack,
    Acquire,
    AcquireResult,
    Pause,
    Prefetch,
    Proceed,
    Resume,
    Sweep,
)
from kvactors.prefix_index.parts import hash_first
from kvactors.prefix_index.settings import IndexSettings
from kvactors.prefix_index.sleeping import Sleep

GIVEN_UP = "this request was given up"


class Requests:
    """The entrance: where a request waits or is admitted."""

    def __init__(
        self,
        index: BlockIndex,
        held: HeldRequests,
        admission: Admission,
        grants: Grants,
        long: LongRequests,
        lineages: LineageSource,
        victims: HostVictims,
        settings: IndexSettings,
        sleep: Sleep,
        forks: Forks,
    ) -> None:
        self._sleep = sleep
        self._forks = forks
        self._index = index
        self._held = held
        self._admission = admission
        self._grants = grants
        self._long = long
        self._lineages = lineages
        self._victims = victims
        self._settings = settings

    def acquire(self, message: Acquire, envelope: Envelope[AcquireResult]) -> list[Action]:
        """Match, pin and take blocks: now, once enough of them are free, or after a pause."""
        if self._held.asleep:
            return [Refusal(envelope, CacheAsleep())]
        if self._held.paused or self._held.requests:
            return [self._held.hold(message, envelope)]
        return self._enter(message, envelope)

    def _enter(self, message: Acquire, envelope: Envelope[AcquireResult]) -> list[Action]:
        """Admit a request, behind those that wait for space."""
        admission = self._admission
        needed = self._index.blocks_for(message.path.num_tokens)
        if needed > self._index.pool.total:
            return [admission.never_fits(envelope, needed)]
        space, forking = admission.space, admission.forking
        if not (space.requests or space.retried or forking.requests or forking.retried):
            return self._admit(message, needed, envelope)
        if message.wait_for_room:
            return [space.hold(message, envelope)]
        return [admission.count_refusal(envelope, NoRoom(needed, 0))]

    def _admit(
        self, message: Acquire, needed: int, envelope: Envelope[AcquireResult]
    ) -> list[Action]:
        """Admit a request of `needed` blocks under the present namespace, or begin to."""
        self._grants.set_root(message.path, message.scope)
        if needed > self._index.part:
            return self._long.admit(message, needed, envelope)
        return self._grants.admit(message, needed, envelope)

    def pause(self, message: Pause, envelope: Envelope[Ack]) -> list[Action]:
        """Hold new requests, and answer once no transfer is in flight. For a sleep, see `Sleep`."""
        if message.asleep:
            return self._sleep.begin(envelope)
        self._held.paused = True
        return self._admission.wait_idle(envelope)

    def resume(self, message: Resume, envelope: Envelope[Ack]) -> list[Action]:
        """Admit requests again, first those that waited."""
        if message.awake:
            self._sleep.end()
        else:
            self._held.paused = False
        return [Reply(envelope, Ack(len(self._held))), *self._admit_waiting()]

    def go_on(self, message: Proceed | Sweep) -> list[Action]:
        """A turn's share of the requests that wait, for blocks or after a pause, or of the work
        after a clear."""
        if isinstance(message, Sweep):
            return self._admission.sweeper.step()
        return self._admission.proceed() + self._admit_waiting()

    def _admit_waiting(self) -> list[Action]:
        """Those that wait for space came before those of a pause. Forks come before both: the
        leases that they are of hold blocks."""
        return self._forks.retry() + self._admit_room() + self._admit_held()

    def _admit_room(self) -> list[Action]:
        """A turn's share of the requests that wait for space, up to the first that does not fit."""
        space, admission, actions = self._admission.space, self._admission, list[Action]()
        for _ in range(STEPS):
            held = space.first
            if held is None or self._held.paused or space.retried or admission.forking.requests:
                return actions
            message, envelope = held.message, held.envelope
            if envelope.abandoned:
                actions += self._give_up(space.remove(message.lease))
                continue
            path = message.path
            if path.num_held or path.num_blocks:
                return actions  # it is still being released after the last attempt
            self._grants.set_root(path, message.scope)
            fetch = self._settings.fetchable(path, message.stored)
            needed = self._index.needed_blocks(
                path, message.chunk_tokens, fetch=fetch, media=message.media
            )
            if not self._index.fits(path, needed, admission.unpromised(), message.media):
                return actions
            space.retry(message.lease)
            whole = self._index.blocks_for(path.num_tokens)
            actions += self._admit(message, whole, envelope)
            if whole <= self._index.part:
                space.retried.discard(message.lease)
            if message.lease in space.requests:
                return actions  # it fitted no more, and is the first again
        return actions + admission.proceed_later() if space.requests else actions

    def _admit_held(self) -> list[Action]:
        """A turn's share of the requests that waited for the end of a pause."""
        actions: list[Action] = []
        for _ in range(STEPS):
            held = self._held.take_next()
            if held is None:
                return actions
            if not held.envelope.abandoned:
                actions += self._enter(held.message, held.envelope)
        if self._held:
            actions += self._admission.proceed_later()
        return actions

    def cancel(self, lease: int) -> list[Action]:
        """The caller of a request that waits, for blocks or for the end of a pause, has gone."""
        actions = self._admission.cancel(lease, GIVEN_UP)
        for queue in (self._held, self._admission.space):
            actions += self._give_up(queue.remove(lease))
        return actions + self._admission.serve_waiting()

    def _give_up(self, held: Held[Acquire] | None) -> list[Action]:
        return [] if held is None else [Refusal(held.envelope, LeaseEnded(GIVEN_UP))]

    def expire(self, lease: int, ticket: int) -> list[Action]:
        """The deadline of a request that waits has passed."""
        held = self._held.expire(lease, ticket)
        if held is not None:
            return [Refusal(held.envelope, Paused("the cache is paused"))]
        held = self._admission.space.expire(lease, ticket)
        if held is not None:
            needed = self._index.blocks_for(held.message.path.num_tokens)
            return self._not_released(held.envelope, needed)
        fork = self._admission.forking.expire(lease, ticket)
        if fork is not None:
            return self._not_released(fork.envelope, len(fork.message.leases))
        return self._admission.expire(lease, ticket)

    def _not_released(self, envelope: Envelope[Any], needed: int) -> list[Action]:
        error = DeadlineExceeded(
            f"other requests did not release enough device blocks in time: {needed} needed, "
            f"{self._admission.available()} available"
        )
        return [Refusal(envelope, error), *self._admission.serve_waiting()]

    def prefetch(self, message: Prefetch, envelope: Envelope[Ack]) -> list[Action]:
        """Ask the host tier to fetch the blocks that the device lacks."""
        if not self._index.pool.total:
            return [Refusal(envelope, NumBlocksUnset())]
        if self._held.asleep:
            return [Refusal(envelope, CacheAsleep())]
        self._grants.set_root(message.path, message.scope)
        if not self._settings.fetchable(message.path):
            return [Reply(envelope, Ack())]
        begin = partial(self._prefetch, message, envelope)
        return hash_first(message.path, self._index.part, begin)

    def _prefetch(self, message: Prefetch, envelope: Envelope[Ack]) -> list[Action]:
        """The same with the block hashes."""
        path, index = message.path, self._index
        if self._held.asleep or self._grants.set_root(path, message.scope):
            return self.prefetch(message, envelope)  # changed since
        limit = index.match_limit(path)
        start, states = index.tree.peek(path, limit)
        limit = min(limit, self._settings.fetchable(path))
        wanted = max(0, limit - start)
        actions: list[Action] = [Reply(envelope, Ack(wanted))]
        if wanted:
            lineages = self._lineages.of_path(path, 0, limit)
            hashes, deadline = path.hashes(0, limit), message.deadline
            held = sum(1 for state in states[:wanted] if state & HOST)
            actions = [
                *self._victims.before(wanted - held),
                PrefetchToHost(path.root, hashes, start, deadline, lineages, path.salt),
                *actions,
            ]
        return actions
