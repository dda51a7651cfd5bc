"""Requests before they have a lease: held during a pause, admitted at once, or in parts."""

from __future__ import annotations

from itertools import islice
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
from kvactors.prefix_index.held import Held, HeldRequests, SpaceQueue
from kvactors.prefix_index.host_victims import HostVictims
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.lineages import LineageSource
from kvactors.prefix_index.long_requests import LongRequests
from kvactors.prefix_index.messages import (
    Ack,
    Acquire,
    AcquireResult,
    Fork,
    Pause,
    Prefetch,
    Proceed,
    Resume,
    Sweep,
)
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
        """Admit a request, before those that wait for space if it fits and may overtake them."""
        admission = self._admission
        self._grants.set_root(message.path, message.scope)
        needed = self._index.blocks_for(message.path.num_tokens)
        error = admission.unreachable(message.path, needed, message.deadline, message.media)
        if error is not None:
            return [admission.count_refusal(envelope, error)]
        heads = admission.heads()
        if not heads:
            return self._admit(message, needed, envelope)
        claims = admission.forking.claims + admission.space.claims + needed
        if claims <= admission.spare(heads) and self._fits(message):
            admission.overtakings += 1
            return self._admit(message, needed, envelope)
        if message.wait_for_room:
            return [admission.hold(envelope)]
        error = NoRoom(needed, 0, self._index.tree.pinned, "requests that wait for room come first")
        return [admission.count_refusal(envelope, error)]

    def _fits(self, message: Acquire | Fork) -> bool:
        """Whether a request that holds nothing, or the copies of a fork, can have blocks now."""
        if isinstance(message, Fork):
            return self._admission.available() >= len(message.leases)
        path, index, media = message.path, self._index, message.media
        self._grants.set_root(path, message.scope)
        fetch = self._settings.fetchable(path, message.stored)
        needed = index.needed_blocks(path, message.chunk_tokens, fetch=fetch, media=media)
        return index.fits(path, needed, self._admission.unpromised(), media)

    def _admit(
        self, message: Acquire, needed: int, envelope: Envelope[AcquireResult]
    ) -> list[Action]:
        """Admit a request of `needed` blocks, or begin to."""
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
        """Those that wait for space came before those of a pause."""
        return self._admit_room() + self._admit_held()

    def _admit_room(self) -> list[Action]:
        """Look at the first requests that wait for space, and admit those that fit, unless they
        would overtake others too often. Forks come first: the leases that they are of hold
        blocks."""
        admission, actions, heads = self._admission, list[Action](), list[Held[Any]]()
        queues: tuple[SpaceQueue[Any], ...] = (admission.forking, admission.space)
        before, claims, spare = sum(map(len, queues)), 0, admission.spare(heads)
        for queue in queues:
            head: Held[Any] | None = None
            for held in list(islice(queue.requests.values(), STEPS)):
                message = held.message
                if held.envelope.abandoned:
                    actions += self._give_up(queue.remove(message.lease))
                    continue
                if isinstance(message, Acquire) and not self._can_try(message):
                    return actions
                if claims + held.claim <= spare and self._fits(message):
                    admission.overtakings += bool(heads)
                    actions += self._retry(queue, held)
                    spare = admission.spare(heads)
                if message.lease not in queue.requests:
                    continue
                if head is None:
                    head = held
                    heads.append(head)
                    spare = admission.spare(heads)
                claims += held.claim
                if claims >= spare:
                    break  # no later request may overtake
        after = sum(map(len, queues))
        return actions + admission.proceed_later() if STEPS < after < before else actions

    def _can_try(self, message: Acquire) -> bool:
        """Whether a request that waits for space can be matched now."""
        path = message.path
        releasing = path.num_held or path.num_blocks  # what it had in its last attempt
        return not (releasing or self._held.paused or self._admission.space.retried)

    def _retry(self, queue: SpaceQueue[Any], held: Held[Any]) -> list[Action]:
        """Admit a request that waited for space. It has its place again if it does not fit."""
        message, envelope = held.message, held.envelope
        queue.retry(message.lease)
        if isinstance(message, Fork):
            actions = self._forks.fork(message, envelope)
        else:
            whole = self._index.blocks_for(message.path.num_tokens)
            actions = self._admit(message, whole, envelope)
            if whole > self._index.part:
                return actions  # over several turns: see `Admission.end_retry`
        queue.retried.pop(message.lease, None)
        return actions

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
            f"{self._admission.available()} available, {self._index.tree.pinned} pinned"
        )
        return [Refusal(envelope, error), *self._admission.serve_waiting()]

    def prefetch(self, message: Prefetch, envelope: Envelope[Ack]) -> list[Action]:
        """Ask the host tier to fetch the blocks that the device lacks."""
        if not self._index.pool.total:
            return [Refusal(envelope, NumBlocksUnset())]
        if self._held.asleep:
            return [Refusal(envelope, CacheAsleep())]
        path, index = message.path, self._index
        self._grants.set_root(path, message.scope)
        limit = min(index.match_limit(path), self._settings.fetchable(path, message.stored))
        start, states = index.tree.peek(path, limit)
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
