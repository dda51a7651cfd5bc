"""The ledger: which blocks are resident where, what each sink believes of that, and the difference. Pure state.

It is a tree of its own. It learns tokens and names from announced paths, and so can name the complete path when a block goes.
News of one block come from several actors, in any order: a block that left one tier and has not reached the next, or that a path
named before its tier did, stays for a while although it is nowhere ("limbo"). Otherwise there is an entry only for a block that is
resident, believed resident, or above such a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvactors.flush_notifier.checks import check_steps
from kvactors.flush_notifier.messages import Announced
from kvactors.flush_notifier.order import Order
from kvactors.flush_notifier.runs import BITS, LAST, Batch, Entry, Holding, Steps, as_task, clear_task, finish, pick, runs_of
from kvactors.flush_notifier.view import SinkView
from kvactors.identity import block_hash
from kvactors.units import ALL_TIERS, KEY_BYTES, Reason, Tier, count_keys, key_at

LIMBO = 16_384
"""Blocks that are nowhere and yet remembered, unless told otherwise."""

UNSURE = 3
"""Bits by which a sink's state holds the tiers it may believe or not."""

SLICE = 256
"""Blocks looked at in one step."""


class Ledger:
    """views: one per sink. limbo: blocks remembered although they are nowhere. takes_clear: the sinks to which "everything is gone" may
    be told as one task. by_name: the sinks that need no paths. step: blocks looked at in one step. token_root: the root hash of the only
    scope whose blocks go to sinks that address them by tokens alone."""

    def __init__(
        self,
        block_size: int,
        views: list[SinkView],
        limbo: int = LIMBO,
        takes_clear: Collection[int] = (),
        by_name: Collection[int] = (),
        step: int = SLICE,
        token_root: bytes = b"",
    ) -> None:
        self._token_root = token_root if any(view.by_tokens for view in views) else b""
        self.step = step
        self.block_bytes = 4 * block_size
        self.views = views
        self.entries: dict[bytes, Entry] = {}
        self.order = (
            Order()
        )  # of the same entries: parents before children, and none is missed or met twice while others come and go
        self.version = 0  # counts the steps that may have changed something
        self.unnamed: dict[bytes, int] = {}  # resident (so as many as there are blocks at most), but no path has named them yet
        self.clock = 0  # counts the differences that began
        self.dirty: list[dict[Entry, int]] = [{} for _ in views]  # per sink, when they began to differ, in that order
        self.coalesced = [0] * len(views)
        self._takes_clear = takes_clear
        self._by_name = by_name
        self._cleared: set[int] = set()  # of those sinks: everything they believe was gone at once, and they have not been told
        self._tables = [view.table() for view in views]
        self.limbo: dict[Entry, None] = {}
        self.trimming = 0  # calls of `_trim` that have steps to come
        self.settling = 0  # ends of deliveries that have steps to come
        self.limbo_bound = max(1, limbo)

    # -- what is true: steps of at most SLICE blocks, between which others may run (but no other fact may come)

    def announce(self, message: Announced) -> Iterator[None]:
        """Blocks of a path are resident: the first `count` of those in the message. It names all of them."""
        total, count = count_keys(message.keys), message.count
        if len(message.tokens) != self.block_bytes * total:
            raise ValueError("an announced path needs a block hash for each block")
        bit, reason, finished = int(message.tier), message.reason, message.reason is Reason.REQUEST_FINISH
        parent, parent_key = self.entries.get(message.parent) if message.start else None, message.parent
        if message.start and parent is None:  # this incarnation has not been sent the path above yet: it names them later
            yield from self.gain(message.keys[: count * KEY_BYTES], message.tier, reason)
            return
        self.version += 1
        for i in range(total):
            key = key_at(message.keys, i)
            entry = self.entries.get(key)
            if entry is None:
                entry = self._learn(key, parent, parent_key, message, i)
            if i < count:
                entry.finished |= finished
                entry.truth |= bit
                entry.reasons[LAST] = entry.reasons[bit] = reason
            self._look(entry)
            parent, parent_key = entry, key
            if i % self.step == self.step - 1:
                entry.held += 1  # it must not be forgotten before its child is there
                yield from self._trim()
                yield
                self._let_go(entry)
                self.version += 1
        yield from self._trim()

    def _learn(self, key: bytes, parent: Entry | None, parent_key: bytes, message: Announced, position: int) -> Entry:
        tokens = message.tokens[position * self.block_bytes : (position + 1) * self.block_bytes]
        entry = Entry(key, parent, parent_key, tokens, message.origin, len(self.views))
        entry.truth = self.unnamed.pop(key, 0)
        self.entries[key] = entry
        self.order.add(entry)
        if parent is not None:
            parent.children += 1
        if self._token_root and (parent.by_tokens if parent is not None else parent_key == self._token_root):
            entry.by_tokens = key == block_hash(parent_key, tokens)  # a block with an extra key has another hash
        return entry

    def gain(self, keys: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        """These are resident on `tier`."""
        bit = int(tier)
        for i in range(count_keys(keys)):
            if not i % self.step:
                if i:
                    yield
                self.version += 1
            key = key_at(keys, i)
            entry = self.entries.get(key)
            if entry is None:
                self.unnamed[key] = self.unnamed.get(key, 0) | bit
            else:
                entry.truth |= bit
                entry.reasons[LAST] = entry.reasons[bit] = reason
                self._look(entry)
        yield from ()

    def lose(self, keys: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        """These left `tier`."""
        bit = int(tier)
        for i in range(count_keys(keys)):
            if not i % self.step:
                if i:
                    yield from self._trim()
                    yield
                self.version += 1
            key = key_at(keys, i)
            entry = self.entries.get(key)
            if entry is not None:
                self._lose(entry, bit, reason)
            elif left := self.unnamed.pop(key, 0) & ~bit:
                self.unnamed[key] = left
        yield from self._trim()

    def clear(self, tier: Tier, reason: Reason) -> Iterator[None]:
        """Nothing is resident on `tier`."""
        bit = int(tier)
        left = 0  # the tiers that still hold something
        for i, entry in enumerate(self.order.up_to(self.order.last_number), 1):
            self._lose(entry, bit, reason)
            left |= entry.truth
            if not i % self.step:
                self.version += 1
                yield from self._trim()
                yield
        self.version += 1
        yield from self._trim()
        nowhere: list[bytes] = []
        for i, (key, tiers) in enumerate(self.unnamed.items(), 1):  # no other fact comes, so no name does
            if tiers & ~bit:
                self.unnamed[key] = tiers & ~bit
            else:
                nowhere.append(key)
            if not i % self.step:
                yield
        for i, key in enumerate(nowhere, 1):
            del self.unnamed[key]
            if not i % self.step:
                yield
        if reason is Reason.CLEAR:
            self._cleared.update(sink for sink in self._takes_clear if not self._tables[sink][left])

    def _lose(self, entry: Entry, bit: int, reason: Reason) -> None:
        if entry.truth & bit:
            entry.truth &= ~bit
            entry.reasons[LAST] = entry.reasons[bit] = reason
            self._look(entry)

    # -- the difference

    def due(self, entry: Entry, sink: int) -> int:
        """What the sink should believe of a block by now, as a set of tiers."""
        view, tiers = self.views[sink], self._tables[sink][entry.truth]
        if view.by_tokens and not entry.by_tokens:
            return 0
        return tiers if entry.finished or not view.at_finish else tiers & entry.states[sink]

    def _look(self, entry: Entry) -> None:
        """An entry changed: see for which sinks it differs now."""
        for sink, dirty in enumerate(self.dirty):
            if self.due(entry, sink) != entry.states[sink]:
                if entry not in dirty:
                    self.clock += 1
                    dirty[entry] = self.clock
            elif entry in dirty:
                del dirty[entry]
                self.coalesced[sink] += not entry.held
        if not entry.truth and entry.idle():
            self._remember(entry)

    def _remember(self, entry: Entry) -> None:
        """Keep an idle entry among the last idle ones. An entry that comes back into use loses its place when its turn comes."""
        self.limbo.pop(entry, None)
        self.limbo[entry] = None

    def _let_go(self, entry: Entry) -> None:
        """One reference to an entry less, from outside of the tree."""
        entry.held -= 1
        if not entry.truth and entry.idle():
            self._remember(entry)

    def _trim(self) -> Iterator[None]:
        """Forget the oldest idle entries beyond the bound. Runs at the end of a step only: within a step every entry that is idle by then
        has been remembered, so no entry that the step still refers to is forgotten."""
        if len(self.limbo) <= self.limbo_bound:
            return
        self.trimming += 1
        self.version += 1
        done = 0
        while len(self.limbo) > self.limbo_bound:
            oldest = next(iter(self.limbo))
            del self.limbo[oldest]
            entry: Entry | None = oldest
            while entry is not None and not entry.children and entry.idle() and entry not in self.limbo:
                del self.entries[entry.key]
                self.order.remove(entry)
                entry = entry.parent
                if entry is not None:
                    entry.children -= 1
                    done += 1
                    if not done % self.step:
                        entry.held += 1
                        yield
                        entry.held -= 1
                        self.version += 1
        self.trimming -= 1

    def pending(self, sink: int) -> int:
        """Blocks on which a sink's belief and the truth that is due differ."""
        return len(self.dirty[sink])

    def told_until(self, sink: int) -> int:
        """Every difference that began up to here (by `clock`) has been delivered to the sink, or has vanished."""
        return next(iter(self.dirty[sink].values()), self.clock + 1) - 1

    def take(self, sink: int, limit: int, epoch: int) -> Batch:
        """All steps of `taking`."""
        return finish(self.taking(sink, limit, epoch))

    def taking(self, sink: int, limit: int, epoch: int) -> Steps[Batch]:
        """The next differences of a sink, about `limit` blocks, in the order of `runs.ordered`; they are in delivery until `delivered` or
        `refused`. No fact may come between the steps."""
        if sink in self._cleared:
            self._cleared.discard(sink)
            if self.dirty[sink]:
                return Batch([clear_task(self.views[sink].tiers, epoch)], [], self.order.last_number)
        losses: dict[int, list[Entry]] = {}
        gains: dict[int, list[Entry]] = {}
        picked = yield from pick(self.dirty[sink], limit, self.step)
        for i, entry in enumerate(picked, 1):
            due, state = self.due(entry, sink), entry.states[sink]
            for bit in BITS[((due ^ state) | state >> UNSURE) & ALL_TIERS.value]:
                (gains if due & bit else losses).setdefault(bit, []).append(entry)
            if not i % self.step:
                yield
        by_name = sink in self._by_name
        paths = None if by_name else limit
        runs = yield from runs_of(losses, gains, node=self.views[sink].node, paths=paths, step=self.step)
        tasks = []
        for run in runs:
            tasks.append((yield from as_task(run, epoch, by_name=by_name, step=self.step)))
            for i, entry in enumerate(run.entries, 1):
                entry.held += 1
                if not i % self.step:
                    yield
        return Batch(tasks, runs)

    def delivered(self, sink: int, batch: Batch) -> None:
        """All steps of `delivering`."""
        finish(self.delivering(sink, batch))

    def delivering(self, sink: int, batch: Batch) -> Steps[None]:
        """The sink took these: they are its view now, whatever has become true since. Of a clear: what has come back since differs."""
        self.version += 1
        self.settling += 1
        sent: dict[Entry, int] = {}
        looked = 0
        for entries, bit, resident, _ in batch.runs:
            settled, view = ~(bit | bit << UNSURE), bit if resident else 0
            for entry in entries:
                entry.states[sink] = entry.states[sink] & settled | view
                sent[entry] = sent.get(entry, 0) | bit | bit << UNSURE
                looked += 1
                if not looked % self.step:
                    yield
        for i, (entry, bits) in enumerate(sent.items(), 1):
            if not (self.due(entry, sink) ^ entry.states[sink]) & ~bits:
                self.dirty[sink].pop(entry, None)  # if it differs again in what was sent, that began later
            if not i % self.step:
                yield
        for i, entry in enumerate(self.order.up_to(batch.cleared), 1):
            if entry.states[sink]:
                entry.states[sink] = 0
                self.dirty[sink].pop(entry, None)
                self._look(entry)
            if not i % self.step:
                self.version += 1
                yield from self._trim()
                yield
        yield from self._end(batch)

    def refused(self, sink: int, batch: Batch) -> None:
        """All steps of `refusing`."""
        finish(self.refusing(sink, batch))

    def refusing(self, sink: int, batch: Batch) -> Steps[None]:
        """No answer, or a bad one. The sink may have taken any of these all the same: they are sent again, whatever is true then."""
        self.version += 1
        self.settling += 1
        if batch.cleared:
            self._cleared.add(sink)
        for i, entry in enumerate(self.order.up_to(batch.cleared), 1):
            if entry.states[sink]:
                entry.states[sink] |= (entry.states[sink] & ALL_TIERS.value) << UNSURE
                self._look(entry)
            if not i % self.step:
                yield
        looked = 0
        for run in batch.runs:
            for entry in run.entries:
                entry.states[sink] |= run.bit << UNSURE
                looked += 1
                if not looked % self.step:
                    yield
        yield from self._end(batch)

    def _end(self, batch: Batch) -> Iterator[None]:
        looked = 0
        for run in batch.runs:
            for entry in run.entries:
                self._look(entry)
                looked += 1
                if not looked % self.step:
                    yield
        for run in batch.runs:
            for entry in reversed(run.entries):  # the deepest first: they are to be forgotten first
                self._let_go(entry)
                looked += 1
                if not looked % self.step:
                    self.version += 1
                    yield
        self.version += 1
        self.settling -= 1
        yield from self._trim()

    # -- for inspection

    def view(self, sink: int) -> Iterator[tuple[bytes, int]]:
        """What a sink was sent and took: block hashes and sets of tiers. What changes between two of them may or may not show."""
        for entry in self.order.up_to(self.order.last_number):
            if tiers := entry.states[sink] & ALL_TIERS.value:
                yield entry.key, tiers

    def holdings(self, sink: int, *, every: bool = False) -> Iterator[Holding]:
        """The same with all that a snapshot needs, parents before children. every: also blocks that the sink was sent as gone, or not at all."""
        for entry in self.order.up_to(self.order.last_number):
            if (tiers := entry.states[sink] & ALL_TIERS.value) or every:
                yield Holding(entry.key, entry.parent_key, entry.depth - 1, entry.tokens, tiers, entry.origin)

    def check(self) -> None:
        """AssertionError if counts and differences are not what the entries say."""
        finish(check_steps(self))

    def check_steps(self) -> Iterator[None]:
        """The same in steps, between which anything may happen."""
        return check_steps(self)
