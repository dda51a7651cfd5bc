"""Requests that are granted in one turn, or that wait for blocks: match, pin, take device
blocks."""

from __future__ import annotations

from kvactors.actor import Envelope
from kvactors.identity import RequestScope
from kvactors.native import Path
from kvactors.prefix_index.actions import Action, Reply
from kvactors.prefix_index.admission import Admission, Waiter
from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.endings import Endings
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.index import BlockIndex, Match
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.loads import LoadTable
from kvactors.prefix_index.messages import Acquire, AcquireResult
from kvactors.prefix_index.records import LeaseState
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.settings import IndexSettings
from kvactors.quotas import salt_id


class Grants:
    """Gives requests their device blocks."""

    def __init__(
        self,
        index: BlockIndex,
        leases: LeaseTable,
        loads: LoadTable,
        evictions: Evictions,
        announcements: Announcements,
        admission: Admission,
        endings: Endings,
        roots: Roots,
        settings: IndexSettings,
    ) -> None:
        self._index = index
        self._leases = leases
        self._loads = loads
        self._evictions = evictions
        self._announcements = announcements
        self._admission = admission
        self._endings = endings
        self._roots = roots
        self._settings = settings

    def set_root(self, path: Path, scope: RequestScope) -> bool:
        """Let a path start from the root hash of the present namespace. Returns whether it did
        not."""
        root = self._roots.root(scope)
        changed = path.root != root
        if changed:
            path.set_root(root)
        if scope.salt is not None:
            path.salt = number = salt_id(scope.salt)
            self._index.policy.quotas.counts.see(number, scope.salt)
        self._announcements.remember(root, scope)
        return changed

    # -- acquire

    def admit(
        self, message: Acquire, needed: int, envelope: Envelope[AcquireResult]
    ) -> list[Action]:
        """Match a request and give it `needed` blocks, shared ones included, or let it wait."""
        path, index, admission = message.path, self._index, self._admission
        free, fetch = index.free, 0
        if self._settings.fetch:
            fetch = self._settings.fetchable(path, message.stored)
        if message.chunk_tokens:
            needed = index.needed_blocks(
                path, message.chunk_tokens, fetch=fetch, media=message.media
            )
        if free < needed and not (
            admission.releasing or index.can_fit(path, needed, admission.unpromised())
        ):
            return [admission.no_room_refusal(envelope, needed)]
        index.policy.advance(index.tree)
        certain = not admission.waiting and free >= needed  # without any hit
        match = index.match(
            path, fetch=fetch, media=message.media, chunk=message.chunk_tokens, used=certain
        )
        lease = LeaseState(
            message.lease,
            message.request_id,
            path,
            index.tree,
            message.deadline,
            message.media,
            match.num_device_blocks,
            match.expected_blocks,
        )
        lease.hints = message.hints
        if not admission.waiting and free >= match.new_blocks:
            if not certain:
                index.tree.keep(path)
            return self._grant(lease, match, index.take(match.new_blocks), envelope)
        return self._wait(lease, match, message, envelope)

    def _wait(
        self,
        lease: LeaseState,
        match: Match,
        message: Acquire,
        envelope: Envelope[AcquireResult],
    ) -> list[Action]:
        """Let a request wait for its blocks, or refuse it. A refused one uses nothing: requests
        that try again would otherwise keep each other's victims, and none would get its blocks."""
        wait, admission = message.wait or message.wait_for_room, self._admission
        actions = self._loads.begin(lease, match.segments, placed=False) if wait else []
        waiter = AcquireWaiter(self, lease, match, message, envelope)
        accepted, queued = admission.request(waiter, wait=wait, deadline=message.deadline)
        actions += queued
        if not accepted:
            actions += self.forget(lease)
            actions.append(admission.no_room_refusal(envelope, match.new_blocks))
        elif admission.waiting.get(message.lease) is waiter:
            lease.tree.keep(lease.path, used=False)
        return actions

    def forget(self, lease: LeaseState) -> list[Action]:
        """A lease gets no blocks."""
        return self._endings.forget(lease)

    def grant_late(
        self,
        lease: LeaseState,
        match: Match,
        blocks: list[int],
        message: Acquire,
        envelope: Envelope[AcquireResult],
    ) -> list[Action]:
        """A request that waited has its blocks. The cached part of its path or its namespace may
        have changed: match again, and continue with the loads sent ahead only if nothing has."""
        before, index = lease.tree, self._index
        # The table may hold new blocks in place of a shared load that was not completed.
        index.pool.give(lease.tree.release(lease.path))
        lease.fault = None
        lease.tree = index.tree
        changed = self.set_root(lease.path, message.scope)
        fetch = self._settings.fetchable(lease.path, message.stored)
        index.policy.advance(index.tree)
        again = index.match(lease.path, fetch=fetch, media=lease.media, chunk=message.chunk_tokens)
        if (
            not changed
            and again == match
            and lease.tree is before
            and len(lease.loads) == len(match.segments)
        ):
            index.fill_table(lease.path, match, blocks)
            return self._loads.place(lease) + self.granted(lease, envelope)
        actions = self._loads.cancel(lease, 0)
        actions += self._endings.detach(lease)
        # Blocks whose loads have completed since are on the device now.
        lease.device_hits, lease.host_hits, lease.storage_hits = again.num_device_blocks, 0, 0
        lease.expected_blocks = again.expected_blocks
        lacking = max(0, again.new_blocks - len(blocks))  # a clear may have removed hits
        if lacking > index.free:
            actions += self._evictions.drop(lacking - index.free, lease.path.salt)
        if lacking > index.free:
            index.pool.give(blocks)
            actions += self.forget(lease)
            return [*actions, self._admission.no_room_refusal(envelope, lacking)]
        blocks = blocks + index.take(lacking)
        index.pool.give(blocks[again.new_blocks :])
        return actions + self._grant(lease, again, blocks[: again.new_blocks], envelope)

    def granted(
        self, lease: LeaseState, envelope: Envelope[AcquireResult], table: list[int] | None = None
    ) -> list[Action]:
        """A request has its blocks. table: the block table, if the caller has made it."""
        actions = self._leases.grant(lease)
        if self._index.pool.ages is not None and lease.device_hits:
            self._index.pool.ages.matched(lease.path.blocks(0, lease.device_hits))
        expected = lease.expected_blocks
        if lease.media:
            expected = self._index.before_media(expected, lease.media)
        reply = AcquireResult(
            lease.path.table() if table is None else table,
            expected * self._index.block_size,
            bool(lease.loads),
            lease.device_hits,
        )
        actions.append(Reply(envelope, reply))
        if envelope.abandoned:
            actions += self._endings.give_back(lease)
        elif self._admission.free_low:
            actions += self._admission.evict_to_watermark()
        return actions

    def _grant(
        self, lease: LeaseState, match: Match, blocks: list[int], envelope: Envelope[AcquireResult]
    ) -> list[Action]:
        self._index.fill_table(lease.path, match, blocks)
        if not match.segments:
            return self.granted(lease, envelope)
        loads = self._loads.begin(lease, match.segments, placed=True)
        return loads + self.granted(lease, envelope)


class AcquireWaiter(Waiter):
    """A request that waits for its device blocks. Its loads have been sent ahead."""

    __slots__ = ("_grants", "_match", "_message", "_state")

    def __init__(
        self,
        grants: Grants,
        lease: LeaseState,
        match: Match,
        message: Acquire,
        envelope: Envelope[AcquireResult],
    ) -> None:
        super().__init__(lease.id, envelope, match.new_blocks, lease.path.salt)
        self._grants = grants
        self._state = lease
        self._match = match
        self._message = message

    def complete(self, blocks: list[int]) -> list[Action]:
        """See `Waiter.complete`."""
        grants, lease = self._grants, self._state
        return grants.grant_late(lease, self._match, blocks, self._message, self.envelope)

    def give_up(self) -> list[Action]:
        """See `Waiter.give_up`."""
        return self._grants.forget(self._state)
