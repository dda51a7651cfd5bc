"""Device blocks that leave for the host tier: evictions, saves of finished requests, clears."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import msgspec

from kvactors.actor import Envelope
from kvactors.cpu_evictor.messages import (
    ClearHost,
    DropHostCopies,
    EvictFirst,
    HostCleared,
    KeepHostCopies,
    Offload,
    Save,
)
from kvactors.errors import StoreError
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.messages import Ack
from kvactors.prefix_index.tree import Eviction, pick_hashes, was_cleared
from kvactors.prefix_index.work import IndexEffects, slices
from kvactors.types import Reason

if TYPE_CHECKING:
    from kvactors.prefix_index.actor import PrefixIndex


VICTIMS_OF_MESSAGE = 4096
"""Victims of one message."""

RECENT_CLEARS = 64
"""Clears whose salt is known. With more than these on their way to the host tier, each prompt is
taken for cleared."""


class Evictions:
    """Frees device blocks, in the order of the eviction policy, some of them after copies to the
    host tier.

    With RETAIN in the host tier the index has its statistics, and every report of it: it names the
    next victims there before it sends blocks to keep. A late or lost message costs hits: then the
    host tier evicts the least recently used blocks.

    Attributes:
        started: blocks evicted since this was last set to 0.
        evicted, rescued: all blocks so far, and those of them that were matched again while they
            were being copied.
    """

    def __init__(self, core: PrefixIndex, ops: Iterator[int]) -> None:
        self.started = self.evicted = self.rescued = 0
        self._index, self._out, self._ops = core.index, core.out, ops
        self._announcements = core.announcements
        self._settings = core.settings
        self._offload = core.settings.offload
        self._in_flight: dict[int, Eviction] = {}
        self._stalled: set[int] = set()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def at_once(self) -> bool:
        """Whether blocks can be free only by evictions, and each is with its own: none is copied,
        or has another owner, and no cleared tree has blocks to be returned before."""
        index = self._index
        return not (self._offload or index.reclaimable or index.pool.num_shared)

    def evict(self, wanted: int, salt: int = 0, incoming: int = 0) -> int:
        """Begin to free `wanted` device blocks, at most those of a turn, for a request of a salt
        that takes `incoming` blocks in all. Returns how many blocks are free or will be."""
        count = min(wanted, self._index.turn_blocks)
        if not self._offload:
            return self.drop(count, salt, incoming)
        op = self._index.evict(count, next(self._ops), salt, incoming)
        if op.total:
            self.started += op.total
            self.evicted += op.total
            self._in_flight[op.op] = op
            index, generation = self._index, self._index.memory_generation
            index.coming += op.total
            lineages = self._announcements.lineages_of_eviction(op)
            self.name_host_victims(index.coming)
            self._out.to_evictor(
                Offload(op.op, op.hashes, op.parents, op.blocks, generation, lineages, op.traits)
            )
        return op.total + op.freed

    def evict_for(self, lacking: Callable[[], int], salt: int, incoming: int) -> int:
        """Evict what a request lacks, see `evict`. A block with another owner leaves the tree, and
        is not free: then the next ones are evicted. lacking: blocks that are still to be freed."""
        evicted = 0
        while evicted < self._index.turn_blocks and (deficit := lacking()) > 0:
            more = self.evict(deficit, salt, incoming)
            if not more:
                break
            evicted += more
        return evicted

    def drop(self, wanted: int, salt: int = 0, incoming: int = 0) -> int:
        """Free device blocks as `evict_for` does, without a copy. Returns how many are freed: less
        than `wanted` are free if a block has another owner."""
        freed, evicted, hosted, lost = self._index.drop(wanted, salt, incoming)
        self.started += evicted
        self.evicted += evicted
        self._announcements.removed(hosted, Reason.DEVICE_EVICTION)
        self._announcements.removed(lost, Reason.DEVICE_DROP)
        return freed

    def drop_until(self, free: int, salt: int) -> None:
        """Free device blocks until so many are, as far as possible."""
        index = self._index
        while (lacking := free - index.free) > 0 and self.drop(lacking, salt, lacking):
            pass

    def name_host_victims(self, incoming: int) -> None:
        """The host tier is about to take so many blocks, those in flight included."""
        if not (self._index.policy.host and incoming):
            return
        tree, (most, low) = self._index.tree, self._settings.host_blocks
        blocks = tree.host_kept(self._settings.exclusive) + incoming
        if blocks > most:
            victims = tree.host_victims(min(blocks - low, VICTIMS_OF_MESSAGE))
            if victims:
                self._out.to_evictor(EvictFirst(victims))

    def name_host_victims_for(self, path: Path, start: int, stop: int) -> None:
        """The host tier is about to take the blocks of a path that it lacks."""
        if self._index.policy.host:
            self.name_host_victims(self._index.tree.host_lacks(path, start, stop))

    def finish(self, op: int, on_host: bytes) -> bool:
        """The copies of an eviction are complete: only now are its blocks free. False if it is
        unknown. on_host: one byte a block, not 0 if the host tier has it."""
        eviction = self._remove(op)
        if eviction is not None:
            self._complete(eviction, on_host)
        return eviction is not None

    def stall(self) -> None:
        """The copies in flight may never complete."""
        self._stalled = set(self._in_flight)
        self._index.coming = 0

    def host_lost(self) -> None:
        """The host tier has restarted, and no copy is in flight any more."""
        for op in list(self._in_flight.values()):
            self._remove(op.op)
            self._complete(op, bytes(op.total))

    def drop_host_copies(self, hashes: bytes) -> None:
        """The device has these blocks, and has reported it: an exclusive host tier drops them."""
        if hashes and self._offload:
            self._index.tree.host_blocks_removed(hashes)
            self._out.to_evictor(DropHostCopies(hashes))

    def keep_host_copies(self, hashes: bytes) -> None:
        """The device did not take these loaded blocks: an exclusive host tier keeps them."""
        if hashes and self._offload:
            self._out.to_evictor(KeepHostCopies(hashes))

    def _remove(self, op: int) -> Eviction | None:
        eviction = self._in_flight.pop(op, None)
        if op in self._stalled:
            self._stalled.remove(op)
        elif eviction is not None:
            self._index.coming -= eviction.total
        return eviction

    def _complete(self, op: Eviction, on_host: bytes) -> None:
        past = frozenset(op.tree.forgotten(op.nodes)) if op.tree.sharing else frozenset()
        went, stayed = self._index.finish_evict(op, on_host)
        self.rescued += len(stayed)
        if op.tree.retired:
            return
        if past:
            went = [j for j in went if j not in past]
            stayed = [j for j in stayed if j not in past]
        for hosted, reason in ((True, Reason.DEVICE_EVICTION), (False, Reason.DEVICE_DROP)):
            gone = pick_hashes(op.hashes, [j for j in went if bool(on_host[j]) is hosted])
            self._announcements.removed(gone, reason)
        self.drop_host_copies(pick_hashes(op.hashes, [j for j in stayed if on_host[j]]))


# -- saves


class SavedPath(msgspec.Struct, eq=False):
    """The path of a finished request while it is being saved.

    Attributes:
        parts: messages without an answer, and one more until the finish has sent all of them. 0
            after a restart of the host tier.
    """

    tree: BlockTree
    path: Path
    parts: int
    priority: int = 0
    expiry: float = inf

    def answered(self) -> bool:
        """A message is answered, or all are sent. Returns whether nothing is left to wait for: then
        the path is released."""
        if not self.parts:
            return False
        self.parts -= 1
        return not self.parts


class SaveTable:
    """Paths of finished requests that are offered to the host tier and written to the store. A path
    is held until all its messages are answered."""

    def __init__(self, core: PrefixIndex, ops: Iterator[int]) -> None:
        self._index, self._out, self._ops = core.index, core.out, ops
        self._announcements, self._evictions = core.announcements, core.evictions
        self._settings = settings = core.settings
        self._save_after = settings.save_after
        self._keep = not settings.exclusive
        self.enabled = self._keep or self._save_after > 0
        # By operation: a path, and the position of the first block of the message.
        self.in_flight: dict[int, tuple[SavedPath, int]] = {}

    def __len__(self) -> int:
        return len(self.in_flight)

    def paths(self) -> list[SavedPath]:
        return list(dict.fromkeys(whole for whole, _ in self.in_flight.values()))

    def ranges(self, blocks: int) -> Iterator[tuple[int, int]]:
        """The ranges of a path that are saved in one message each. A store addressed by tokens gets
        the whole path with every message, so it gets one."""
        by_tokens = self._settings.token_root is not None
        return slices(0, blocks, max(1, blocks) if by_tokens else self._index.turn_blocks)

    def start(self, whole: SavedPath, start: int, stop: int) -> None:
        """Offer blocks [start, stop) to the host tier, and to the store those that are hit often
        enough."""
        path, last = whole.path, min(stop, self._settings.storable(whole.path))
        save: list[int] = []
        if self._save_after and start < last:
            save = whole.tree.worth_saving(path, start, last, self._save_after)
        if not (save or self._keep):
            return
        op = next(self._ops)
        whole.parts += 1
        self.in_flight[op] = whole, start
        if self._keep:
            self._evictions.name_host_victims_for(path, start, stop)
        by_tokens = save and self._settings.token_root is not None
        self._out.to_evictor(
            Save(
                op,
                path.parent(start),
                path.hashes(start, stop),
                tuple(path.blocks(start, stop)),
                self._keep,
                tuple(position - start for position in save),
                path.tokens(0, save[-1] + 1) if by_tokens else b"",
                self._index.memory_generation,
                self._announcements.lineages_of_path(path, start, stop),
                path.salt,
                whole.priority,
                whole.expiry,
            )
        )

    def finish(self, op: int, on_host: bytes) -> SavedPath | None:
        """The blocks of a message have been copied. on_host: as in `Evictions.finish`. Returns the
        path, None for an unknown operation."""
        whole, start = self.in_flight.pop(op, (None, 0))
        if whole is not None and not was_cleared(whole.tree, whole.path):
            hashes = whole.path.hashes(start, start + len(on_host))
            kept = pick_hashes(hashes, [j for j, kept in enumerate(on_host) if kept])
            whole.tree.host_blocks_added(kept)
        return whole

    def host_lost(self) -> list[SavedPath]:
        """The host tier has restarted: the paths to be released."""
        lost = self.paths()
        for whole in lost:
            whole.parts = 0  # no further part of it is sent
        self.in_flight.clear()
        return lost


# -- clears


@dataclass(slots=True)
class StoreClear:
    """A clear that includes the store. The envelope is answered when both parts are done."""

    message: ClearHost
    envelope: Envelope[Ack]
    freed: int | None = None  # device blocks, None until the device is done
    cleared: HostCleared | None = None


class TreeClears:
    """Clears of the host tier and the store, by operation."""

    def __init__(self, out: IndexEffects, ops: Iterator[int]) -> None:
        self.sent = 0  # to the present incarnation of the host tier
        self._out = out
        self._ops = ops
        self._waiting: dict[int, StoreClear] = {}
        self._recent: deque[int | None] = deque(maxlen=RECENT_CLEARS)  # salts, None for all

    def reaches(self, salt: int, handled: int) -> bool:
        """Whether a clear of this salt's blocks, or of all, is on its way to the host tier, which
        has handled `handled` clears."""
        pending = self.sent - handled
        newest = islice(self._recent, max(0, pending))
        return pending > RECENT_CLEARS or any(one is None or one == salt for one in newest)

    def start(self, envelope: Envelope[Ack], salt: int | None, *, storage: bool) -> int:
        """Clear the host tier, and the store if `storage`, of the blocks of a salt, None for all.
        Returns the operation."""
        message = ClearHost(storage, next(self._ops), salt)
        if storage:
            self._waiting[message.op] = StoreClear(message, envelope)
        self._send(message)
        return message.op

    def _send(self, message: ClearHost) -> None:
        self.sent += 1
        self._recent.appendleft(message.salt)
        self._out.to_evictor(message)

    def device_cleared(self, op: int, envelope: Envelope[Ack], freed: int) -> None:
        waiting = self._waiting.get(op)
        if waiting is None:
            self._out.reply(envelope, Ack(freed))
            return
        waiting.freed = freed
        self._answer(waiting)

    def finish(self, message: HostCleared) -> None:
        waiting = self._waiting.get(message.op)
        if waiting is not None:
            waiting.cleared = message
            self._answer(waiting)

    def _answer(self, waiting: StoreClear) -> None:
        freed, cleared = waiting.freed, waiting.cleared
        if freed is None or cleared is None:
            return
        del self._waiting[cleared.op]
        if cleared.error:
            self._out.refuse(waiting.envelope, StoreError(cleared.error))
        else:
            self._out.reply(waiting.envelope, Ack(freed, unknown=cleared.unknown))

    def again(self) -> None:
        self.sent = 0
        for message in [one.message for one in self._waiting.values() if one.cleared is None]:
            self._send(message)
