"""CpuEvictor: finished requests. What their path lacks on the host or in storage is copied off the
device."""

from __future__ import annotations

from kvactors.actor import on
from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import Admit, Admitted, SaveUnanswered
from kvactors.cpu_evictor.plane import Plane
from kvactors.cpu_evictor.slots import SlotState
from kvactors.gpu_swapper.messages import Direction
from kvactors.lineage import lineage
from kvactors.types import split_keys

ASK = 1.0
"""Seconds, `storage.timeout` if that is less, that a store may take to answer which blocks of a
finished request it has. The device blocks are held until then."""


class Saves(Plane):
    """Handler of Admit. Nothing remembers here or in the index what storage holds: the store is
    asked at every finish, so a block whose write failed, or that the store has evicted since, is
    written again."""

    @on(Admit)
    def admit(self, message: Admit) -> None:
        """A finished request's path: keep a copy (inclusive tiers), write what is to be saved and
        is not stored."""
        if not (message.save and self.direct is None and self.may_read):
            self._admit(message, 0)
            return
        generation = self.host.generation
        keys = split_keys(message.keys)[: message.save[-1] + 1]

        def answered(found: int) -> None:
            timer.cancel()
            if generation == self.host.generation:
                self._admit(message, found)
            else:  # the tiers were cleared: nothing of before may enter them
                self.tell(self.index, Admitted(message.op, bytes(len(message.blocks))))

        limit = min(ASK, self.storage.timeout)
        op = self.ask_before_write(keys, now() + limit, answered)
        timer = self.after(limit, SaveUnanswered(op))

    @on(SaveUnanswered)
    def save_unanswered(self, message: SaveUnanswered) -> None:
        """The store does not answer: the device blocks are not held for it. The next finish offers
        them again."""
        self.give_up_asking(message.op)

    def _admit(self, message: Admit, stored: int) -> None:
        """stored: leading blocks that storage has."""
        if message.era != self.era:
            self.tell(self.index, Admitted(message.op, bytes(len(message.blocks))))
            return
        keys = split_keys(message.keys)
        save = [position for position in message.save if position >= stored]
        lacking = [j for j, key in enumerate(keys) if key not in self.host.entries]
        if message.keep:
            self.make_room(len(lacking), len(lacking), keys)
            lacking = lacking[
                : max(0, min(len(lacking), self.host.capacity - self.host.resident, self.host.free))
            ]
            place = SlotState.RESIDENT
        else:
            wanted = set(save) if self.direct is None else set()
            lacking = [j for j in lacking if j in wanted][: self.host.free]
            place = SlotState.TRANSIT
        parents = {j: keys[j - 1] if j else message.root for j in lacking}
        entries = [
            self.host.add(keys[j], parent, place, lineage(message.lineages, j, len(keys), parent))
            for j, parent in parents.items()
        ]
        self.host.touch(reversed(keys))

        def then(failed: frozenset[int]) -> None:
            good = self.arrive(entries, failed)
            if message.keep:
                self.gained([entry.key for entry in good])
                self.offloaded += len(good)
            if self.direct is not None and save:
                start = save[0]
                self.save_direct(
                    message.tokens, start, message.blocks[start : save[-1] + 1], lambda _: answer()
                )
            else:
                if self.writers and save:
                    # With copies of the whole path on the host all of it is offered, so that its
                    # beginning counts as used after its end.
                    used = message.save if message.keep else save
                    sources = [self.host.usable(keys[j]) for j in reversed(used)]
                    self.write([entry for entry in sources if entry is not None])
                answer()
            self.keep_watermarks()

        def answer() -> None:
            """What the host holds now: a direct save takes long, and copies may have been evicted
            since."""
            held = (self.host.usable(key) if message.keep else None for key in keys)
            kept = bytes(entry is not None and entry.place is SlotState.RESIDENT for entry in held)
            self.tell(self.index, Admitted(message.op, kept))

        self.copy(Direction.TO_HOST, [message.blocks[j] for j in lacking], entries, then)
