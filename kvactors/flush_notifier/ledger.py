"""The ledger: which blocks are resident where, what each sink believes of that, and the difference. Pure state.

It is a tree of its own. It learns tokens and names from announced paths, and so can name the complete path when a block goes.
News of one block come from several actors, in any order: a block that left one tier and has not reached the next, or that a path
named before its tier did, stays for a while although it is nowhere ("limbo"). Otherwise there is an entry only for a block that is
resident, believed resident, or above such a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvactors.flush_notifier.messages import Announced
from kvactors.flush_notifier.runs import LAST, Batch, Entry, Holding, Run, as_task, clear_task, join, ordered
from kvactors.flush_notifier.view import SinkView
from kvactors.identity import block_hash
from kvactors.units import ALL_TIERS, Reason, Tier, split_keys

LIMBO = 16_384
"""Blocks that are nowhere and yet remembered, unless told otherwise."""

UNSURE = 3
"""Bits by which a sink's state holds the tiers it may believe or not."""

SLICE = 256
"""Blocks looked at in one turn."""

PATHS = 4
"""A batch of n blocks may carry paths of PATHS x n blocks in all: many short runs deep in the tree are told in several batches."""

BITS = tuple([int(tier) for tier in Tier if tier & tiers] for tiers in range(ALL_TIERS + 1))
"""By set of tiers: its members as numbers (plain ints: arithmetic on flags is slow)."""


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
        self.unnamed: dict[bytes, int] = {}  # resident (so as many as there are blocks at most), but no path has named them yet
        self.clock = 0  # counts the differences that began
        self.dirty: list[dict[Entry, int]] = [{} for _ in views]  # per sink, when they began to differ, in that order
        self.coalesced = [0] * len(views)
        self._takes_clear = takes_clear
        self._by_name = by_name
        self._cleared: set[int] = set()  # of those sinks: everything they believe was gone at once, and they have not been told
        self._tables = [view.table() for view in views]
        self._limbo: dict[Entry, None] = {}
        self._limbo_bound = max(1, limbo)

    # -- what is true: steps of at most SLICE blocks, between which others may run (but no other fact may come)

    def announce(self, message: Announced) -> Iterator[None]:
        """Blocks [start, start + count) of a path are resident; all of the path is learned."""
        keys, start, stop = split_keys(message.keys), message.start, message.start + message.count
        assert len(message.tokens) == self.block_bytes * len(keys), "an announced path needs a name for each block"
        bit, reason, finish = int(message.tier), message.reason, message.reason is Reason.REQUEST_FINISH
        # A path whose upper part is known need not be walked from the root, unless the finish is news to that part as well.
        first = start if start and keys[start - 1] in self.entries and not finish else 0
        parent, parent_key = (self.entries[keys[first - 1]], keys[first - 1]) if first else (None, message.root)
        for i in range(first, len(keys)):
            key = keys[i]
            entry = self.entries.get(key)
            if entry is None:
                entry = self._learn(key, parent, parent_key, message, i)
            if i < stop:
                entry.finished |= finish
                if i >= start:
                    entry.truth |= bit
                    entry.reasons[LAST] = entry.reasons[bit] = reason
            self._look(entry)
            parent, parent_key = entry, key
            if i % self.step == self.step - 1:
                entry.held += 1  # it must not be forgotten before its child is there
                self._trim()
                yield
                entry.held -= 1
                if entry.idle():
                    self._remember(entry)
        self._trim()

    def _learn(self, key: bytes, parent: Entry | None, parent_key: bytes, message: Announced, position: int) -> Entry:
        tokens = message.tokens[position * self.block_bytes : (position + 1) * self.block_bytes]
        entry = Entry(key, parent, parent_key, tokens, message.origin, len(self.views))
        entry.truth = self.unnamed.pop(key, 0)
        self.entries[key] = entry
        if parent is not None:
            parent.children += 1
        if self._token_root and (parent.by_tokens if parent is not None else parent_key == self._token_root):
            entry.by_tokens = key == block_hash(parent_key, tokens)  # a block with an extra key has another hash
        return entry

    def gain(self, keys: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        """These are resident on `tier`."""
        bit = int(tier)
        for i, key in enumerate(split_keys(keys), 1):
            entry = self.entries.get(key)
            if entry is None:
                self.unnamed[key] = self.unnamed.get(key, 0) | bit
            else:
                entry.truth |= bit
                entry.reasons[LAST] = entry.reasons[bit] = reason
                self._look(entry)
            if not i % self.step:
                yield

    def lose(self, keys: bytes, tier: Tier, reason: Reason) -> Iterator[None]:
        """These left `tier`."""
        bit = int(tier)
        for i, key in enumerate(split_keys(keys), 1):
            entry = self.entries.get(key)
            if entry is not None:
                self._lose(entry, bit, reason)
            elif left := self.unnamed.pop(key, 0) & ~bit:
                self.unnamed[key] = left
            if not i % self.step:
                self._trim()
                yield
        self._trim()

    def clear(self, tier: Tier, reason: Reason) -> Iterator[None]:
        """Nothing is resident on `tier`."""
        bit = int(tier)
        left = 0  # the tiers that still hold something
        for i, entry in enumerate(list(self.entries.values()), 1):
            self._lose(entry, bit, reason)
            left |= entry.truth
            if not i % self.step:
                self._trim()
                yield
        self._trim()
        self.unnamed = {key: tiers & ~bit for key, tiers in self.unnamed.items() if tiers & ~bit}
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
        self._limbo.pop(entry, None)
        self._limbo[entry] = None

    def _trim(self) -> None:
        """Forget the oldest idle entries beyond the bound. Runs at the end of a step only: within a step every entry that is idle by then
        has been remembered, so no entry that the step still refers to is forgotten."""
        while len(self._limbo) > self._limbo_bound:
            oldest = next(iter(self._limbo))
            del self._limbo[oldest]
            self._forget(oldest)

    def _forget(self, entry: Entry | None) -> None:
        while entry is not None and not entry.children and entry.idle() and entry not in self._limbo:
            del self.entries[entry.key]
            entry = entry.parent
            if entry is not None:
                entry.children -= 1

    def pending(self, sink: int) -> int:
        """Blocks on which a sink's belief and the truth that is due differ."""
        return len(self.dirty[sink])

    def told_until(self, sink: int) -> int:
        """Every difference that began up to here (by `clock`) has been delivered to the sink, or has vanished."""
        return next(iter(self.dirty[sink].values()), self.clock + 1) - 1

    def take(self, sink: int, limit: int, epoch: int) -> Batch:
        """The next differences of a sink, about `limit` blocks, in the order of `runs.ordered`; they are in delivery until `delivered` or
        `refused`."""
        if sink in self._cleared:
            self._cleared.discard(sink)
            if self.dirty[sink]:
                return Batch([clear_task(self.views[sink].tiers, epoch)], [], [*self.entries.values()])
        losses: dict[int, list[Entry]] = {}
        gains: dict[int, list[Entry]] = {}
        for entry in self._pick(sink, limit):
            due, state = self.due(entry, sink), entry.states[sink]
            for bit in BITS[((due ^ state) | state >> UNSURE) & ALL_TIERS.value]:
                (gains if due & bit else losses).setdefault(bit, []).append(entry)
        reason_of = (lambda _: LAST) if self.views[sink].node else int
        runs = [run for bit, some in losses.items() for run in join(some, bit, resident=False, reason_index=reason_of(bit))]
        runs += [run for bit, some in gains.items() for run in join(some, bit, resident=True, reason_index=reason_of(bit))]
        by_name = sink in self._by_name
        runs = ordered(runs) if by_name else list(_within(ordered(runs), PATHS * limit))
        for run in runs:
            for entry in run.entries:
                entry.held += 1
        return Batch([as_task(run, epoch, by_name=by_name) for run in runs], runs)

    def _pick(self, sink: int, limit: int) -> list[Entry]:
        """About `limit` entries: each with those above it that differ as well, and never the first part of a run only, since every part
        would carry the path from the root again."""
        dirty = self.dirty[sink]
        picked: dict[Entry, None] = {}
        last: Entry | None = None
        for entry in dirty:
            if len(picked) >= limit and entry.parent is not last:
                break
            chain, above = [entry], entry.parent
            while above in dirty and above not in picked:
                chain.append(above)
                above = above.parent
            picked.update(dict.fromkeys(reversed(chain)))
            last = entry
        return list(picked)

    def delivered(self, sink: int, batch: Batch) -> None:
        """The sink took these: it believes them now, whatever has become true since."""
        told: dict[Entry, int] = {}
        for entries, bit, resident, _ in batch.runs:
            settled, believed = ~(bit | bit << UNSURE), bit if resident else 0
            for entry in entries:
                entry.states[sink] = entry.states[sink] & settled | believed
                told[entry] = told.get(entry, 0) | bit | bit << UNSURE
        for entry, bits in told.items():
            if not (self.due(entry, sink) ^ entry.states[sink]) & ~bits:
                self.dirty[sink].pop(entry, None)  # if it differs again in what was told, that began later
        self._end(batch)

    def refused(self, sink: int, batch: Batch) -> None:
        """No answer, or a bad one. The sink may have taken any of these all the same: they are told again, whatever is true then."""
        if batch.cleared:
            self._cleared.add(sink)
            for entry in batch.cleared:
                if entry.states[sink]:  # others may have been forgotten since
                    entry.states[sink] |= (entry.states[sink] & ALL_TIERS.value) << UNSURE
                    self._look(entry)
        for run in batch.runs:
            for entry in run.entries:
                entry.states[sink] |= run.bit << UNSURE
        self._end(batch)

    def cleared(self, sink: int, batch: Batch) -> Iterator[None]:
        """The sink took that everything is gone. What has come back meanwhile differs from now on."""
        for i, entry in enumerate(batch.cleared, 1):
            if entry.states[sink]:
                entry.states[sink] = 0
                self.dirty[sink].pop(entry, None)
                self._look(entry)
            if not i % self.step:
                self._trim()
                yield
        self._trim()

    def _end(self, batch: Batch) -> None:
        for run in batch.runs:
            for entry in run.entries:
                self._look(entry)
                entry.held -= 1
        for run in batch.runs:
            for entry in reversed(run.entries):  # the deepest first: they are to be forgotten first
                if not entry.truth and entry.idle():
                    self._remember(entry)
        self._trim()

    # -- for inspection

    def believed(self, sink: int) -> Iterator[tuple[bytes, int]]:
        """What a sink was told and answered: names and sets of tiers."""
        tiers = ((key, entry.states[sink] & ALL_TIERS.value) for key, entry in self.entries.items())
        return ((key, believed) for key, believed in tiers if believed)

    def holdings(self, sink: int) -> Iterator[Holding]:
        """Every block a sink was told is resident, parents before children; what changes meanwhile may or may not show. An entry is
        learned after its parent and forgotten before it, so the order of learning is such an order."""
        for entry in list(self.entries.values()):
            if tiers := entry.states[sink] & ALL_TIERS.value:
                yield Holding(entry.key, entry.parent_key, entry.depth - 1, entry.tokens, tiers, entry.origin)

    def check(self) -> None:
        """AssertionError if counts and differences are not what the entries say."""
        children: dict[bytes, int] = {}
        for entry in self.entries.values():
            if entry.parent is not None:
                assert self.entries.get(entry.parent.key) is entry.parent, "an entry's parent is gone"
                children[entry.parent.key] = children.get(entry.parent.key, 0) + 1
        for key, entry in self.entries.items():
            assert entry.key == key, "an entry under another key"
            assert key not in self.unnamed, "a named block among the unnamed"
            assert entry.children == children.get(key, 0), "child counts disagree"
            assert entry.children or not entry.idle() or entry in self._limbo, "an entry that nothing keeps"
            for sink, dirty in enumerate(self.dirty):
                assert (self.due(entry, sink) != entry.states[sink]) == (entry in dirty), "a difference nobody noticed"
                told = entry.states[sink] and self.views[sink].by_tokens
                assert entry.by_tokens or not told, "a sink addressed by tokens was sent a block that tokens do not identify"
        assert all(self.entries.get(entry.key) is entry for dirty in self.dirty for entry in dirty), "a difference of nobody"
        assert len(self._limbo) <= self._limbo_bound, "too many blocks remembered"
        assert all(self.entries.get(entry.key) is entry for entry in self._limbo), "a block remembered and forgotten"
        assert all(self.unnamed.values()), "an unnamed block that is nowhere"


def _within(runs: list[Run], blocks: int) -> Iterator[Run]:
    """The first runs (one at least) whose paths have `blocks` blocks in all."""
    for i, run in enumerate(runs):
        blocks -= run.entries[-1].depth
        if i and blocks < 0:
            return
        yield run
