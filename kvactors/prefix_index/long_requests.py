"""PrefixIndex, the part that admits requests of very many blocks: a part of them a turn."""

from __future__ import annotations

from collections.abc import Iterator

from kvactors.actor import Envelope
from kvactors.errors import LeaseEnded
from kvactors.native import HOST, LOADING, BlockTree, Path
from kvactors.prefix_index.admission import Admission
from kvactors.prefix_index.messages import Acquire, Granted
from kvactors.prefix_index.records import Lease, Waiting


class LongRequests(Admission):
    """What is pinned stays, and what is reserved is nobody else's, so other requests between two
    parts take nothing from this one. After a clear, a loss of the device or a change of the
    namespace between two parts the request begins anew.

    A request that hits what must be loaded from the host or from storage is admitted in one turn.
    """

    def admit_in_parts(self, message: Acquire, needed: int, envelope: Envelope[Granted]) -> bool:
        """See `Admission`."""
        if self.fetchable(message.path):
            return False
        self.in_parts(self._match(message, needed, envelope))
        return True

    def _match(self, message: Acquire, needed: int, envelope: Envelope[Granted]) -> Iterator[None]:
        path, index, tree = message.path, self.index, self.index.tree
        limit, states = index.match_limit(path), b""
        while not states and path.num_held < limit:
            upto = min(limit, path.num_held + self.part)
            _, states = tree.pin(path, upto)
            if path.num_held < upto:
                break
            yield
            if not self._goes_on(message, tree, envelope):
                yield from self._begin_anew(message, tree, envelope)
                return
        if states and states[0] & (LOADING | HOST):
            yield from self._begin_anew(message, tree, envelope, at_once=True)
            return
        run = index.before_media(path.num_committed, message.media)
        while path.num_held > run:
            index.pool.give(tree.retreat(path, max(run, path.num_held - self.part)))
            yield
            if not self._goes_on(message, tree, envelope):
                yield from self._begin_anew(message, tree, envelope)
                return
        lease = Lease(message.lease, message.request_id, path, tree, message.deadline)
        lease.media, lease.device_hits, lease.hoped = message.media, run, run
        waiter = Waiting(
            lease.id,
            envelope,
            needed - run,
            complete=lambda _: self.in_parts(self._fill(lease, needed, message, envelope)),
            give_up=lambda: self.give_back_path(tree, path),
            reserves=True,
        )
        wait = message.wait or not (
            self.host_tier and self.exclusive
        )  # no copy has to be waited for
        if not self.request_blocks(waiter, wait=wait, deadline=message.deadline):
            self.give_back_path(tree, path)
            self.refuse_room(envelope, needed - run)
            self.room_changed()

    def _fill(
        self, lease: Lease, needed: int, message: Acquire, envelope: Envelope[Granted]
    ) -> Iterator[None]:
        """Every block of the request is there or reserved."""
        path, tree, run = lease.path, lease.tree, lease.device_hits
        table: list[int] = []
        while len(table) < needed:
            if not self._goes_on(message, tree, envelope):
                self.index.reserved -= needed - max(run, len(table))
                self.room_changed()
                yield from self._begin_anew(message, tree, envelope)
                return
            if len(table) < run:
                table += path.blocks(len(table), min(run, len(table) + self.part))
            else:
                blocks = self.index.take_reserved(min(self.part, needed - len(table)))
                path.assign(len(table), blocks)
                table += blocks
            if len(table) < needed:
                yield
        self.grant_long(lease, table, envelope)

    def _goes_on(self, message: Acquire, tree: BlockTree, envelope: Envelope[Granted]) -> bool:
        """Whether the request is still wanted, and of the present tree and namespace."""
        return (
            not envelope.abandoned
            and tree is self.index.tree
            and message.path.root == self.roots.root(message.origin)
        )

    def _begin_anew(
        self,
        message: Acquire,
        tree: BlockTree,
        envelope: Envelope[Granted],
        *,
        at_once: bool = False,
    ) -> Iterator[None]:
        path: Path = message.path
        self.closing += 1
        yield from self.give_back_parts(tree, path)
        self.closing -= 1
        if envelope.abandoned:
            self.refuse(envelope, LeaseEnded("this request was given up"))
        else:
            self.admit(message, envelope, at_once=at_once)
        self.room_changed()
