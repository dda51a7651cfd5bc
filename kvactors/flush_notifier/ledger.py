"""The ledger: which blocks are resident where, what each sink believes of that, and the difference. Pure state.

It is a tree of its own. It learns tokens and names from announced paths, and so can name the complete path when a block goes.
It holds at most one entry a block that is resident, believed resident, or above such a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvactors.flush_notifier.messages import Announced, FlushTask
from kvactors.units import Reason, Residency, Tier, split_keys


class Entry:
    """One block. truth, and per sink `believed`, are sets of tiers. finished: covered by a finished request's path. told: tasks about it
    that sinks are being told now, after which they may believe what is not true any more."""

    __slots__ = (
        "believed",
        "children",
        "depth",
        "finished",
        "key",
        "parent",
        "parent_key",
        "reason",
        "tokens",
        "told",
        "truth",
    )

    def __init__(self, key: bytes, parent: Entry | None, parent_key: bytes, tokens: bytes, sinks: int) -> None:
        self.key = key
        self.parent = parent
        self.parent_key = parent_key
        self.tokens = tokens
        self.depth: int = parent.depth + 1 if parent is not None else 1
        self.children = 0
        self.truth = 0
        self.told = 0
        self.believed = [0] * sinks
        self.finished = False
        self.reason = Reason.COMMIT


class SinkView(NamedTuple):
    """What a sink wants to hear. tiers: of which. node: as one fact, resident while any of them holds it. at_finish: gains are due
    when a request that covers them finishes; otherwise, and for losses, at once."""

    tiers: int
    node: bool
    at_finish: bool


class Change(NamedTuple):
    """One block's difference for one sink. bit: the tier it is about."""

    entry: Entry
    bit: int
    resident: bool


class Ledger:
    """views: one per sink. block_bytes: bytes of a block's tokens (4 a token)."""

    def __init__(self, block_size: int, views: list[SinkView]) -> None:
        self.block_bytes = 4 * block_size
        self.views = views
        self.entries: dict[bytes, Entry] = {}
        self.unnamed: dict[bytes, int] = {}  # resident, but no path has named them yet
        self.dirty: list[dict[bytes, None]] = [{} for _ in views]
        self.coalesced = [0] * len(views)

    # -- what is true

    def announce(self, message: Announced) -> None:
        """Blocks [start, start + count) of a path are resident; the path is learned."""
        keys, stop = split_keys(message.keys), message.start + message.count
        assert len(message.tokens) == self.block_bytes * len(keys), "an announced path needs a name for each block"
        finish = message.reason is Reason.REQUEST_FINISH
        first = self._first_unknown(keys, message.start, finish=finish)
        parent = self.entries.get(keys[first - 1]) if first else None
        parent_key = keys[first - 1] if first else message.root
        for i in range(first, len(keys)):
            entry = self.entries.get(keys[i])
            if entry is None:
                tokens = message.tokens[i * self.block_bytes : (i + 1) * self.block_bytes]
                entry = self._learn(keys[i], parent, parent_key, tokens)
            if finish and i < stop:
                entry.finished = True
            if message.start <= i < stop:
                entry.truth |= message.tier
                entry.reason = message.reason
            self._look(entry)
            parent, parent_key = entry, keys[i]
        if not message.count:
            for key in keys[first:]:
                self._reap(self.entries.get(key))

    def _first_unknown(self, keys: list[bytes], start: int, *, finish: bool) -> int:
        """Where to begin: at `start` if the block before it is known, else at the root."""
        return 0 if finish or (start and keys[start - 1] not in self.entries) else start

    def _learn(self, key: bytes, parent: Entry | None, parent_key: bytes, tokens: bytes) -> Entry:
        entry = Entry(key, parent, parent_key, tokens, len(self.views))
        entry.truth = self.unnamed.pop(key, 0)
        self.entries[key] = entry
        if parent is not None:
            parent.children += 1
        return entry

    def gain(self, keys: bytes, tier: Tier, reason: Reason) -> None:
        """These are resident on `tier`."""
        for key in split_keys(keys):
            entry = self.entries.get(key)
            if entry is None:
                self.unnamed[key] = self.unnamed.get(key, 0) | tier
                continue
            entry.truth |= tier
            entry.reason = reason
            self._look(entry)

    def lose(self, keys: bytes, tier: Tier, reason: Reason) -> None:
        """These left `tier`."""
        for key in split_keys(keys):
            entry = self.entries.get(key)
            if entry is not None:
                entry.truth &= ~tier
                entry.reason = reason
                self._look(entry)
                self._reap(entry)
            elif key in self.unnamed:
                self.unnamed[key] &= ~tier
                if not self.unnamed[key]:
                    del self.unnamed[key]

    def clear(self, tier: Tier, reason: Reason) -> None:
        """Nothing is resident on `tier`."""
        self.lose(b"".join(key for key, entry in self.entries.items() if entry.truth & tier), tier, reason)
        self.lose(b"".join(key for key, mask in self.unnamed.items() if mask & tier), tier, reason)

    # -- the difference

    def due(self, entry: Entry, sink: int) -> int:
        """What the sink should believe of a block by now."""
        view = self.views[sink]
        mask = entry.truth & view.tiers
        if view.node:
            mask = int(Tier.DEVICE) if mask else 0
        if view.at_finish and not entry.finished:
            mask &= entry.believed[sink]
        return mask

    def _look(self, entry: Entry) -> None:
        for sink, dirty in enumerate(self.dirty):
            if self.due(entry, sink) != entry.believed[sink]:
                dirty[entry.key] = None
            elif entry.key in dirty:
                del dirty[entry.key]
                self.coalesced[sink] += 1

    def _reap(self, entry: Entry | None) -> None:
        while entry is not None and not (entry.truth or entry.children or entry.told or any(entry.believed)):
            del self.entries[entry.key]
            for dirty in self.dirty:
                dirty.pop(entry.key, None)
            parent = entry.parent
            if parent is not None:
                parent.children -= 1
            entry = parent

    def pending(self, sink: int) -> int:
        """Blocks on which a sink's belief and the truth that is due differ."""
        return len(self.dirty[sink])

    def take(self, sink: int, limit: int, epoch: int) -> tuple[list[FlushTask], list[Change]]:
        """The next differences of a sink, at most `limit` blocks, as tasks: losses first, children before parents; then gains, parents
        before children. Nothing is believed yet: that is what `delivered` is for."""
        changes: list[Change] = []
        for key, _ in zip(self.dirty[sink], range(limit), strict=False):
            entry = self.entries[key]
            due, believed = self.due(entry, sink), entry.believed[sink]
            for tier in Tier:
                if (due ^ believed) & tier:
                    changes.append(Change(entry, int(tier), bool(due & tier)))
                    entry.told += 1
        losses = [c for c in changes if not c.resident]
        gains = [c for c in changes if c.resident]
        tasks = [self._task(run, epoch) for run in sorted(runs(losses), key=lambda run: -run[-1].entry.depth)]
        tasks += [self._task(run, epoch) for run in sorted(runs(gains), key=lambda run: run[0].entry.depth)]
        return tasks, changes

    def delivered(self, sink: int, changes: Iterable[Change]) -> None:
        """The sink took these: it believes them now, whatever has become true since."""
        touched = []
        for entry, bit, resident in changes:
            entry.told -= 1
            entry.believed[sink] = entry.believed[sink] | bit if resident else entry.believed[sink] & ~bit
            touched.append(entry)
        for entry in touched:
            if self.due(entry, sink) == entry.believed[sink]:
                self.dirty[sink].pop(entry.key, None)
            else:
                self.dirty[sink][entry.key] = None
        for entry in touched:
            if self.entries.get(entry.key) is entry:
                self._reap(entry)

    def refused(self, changes: Iterable[Change]) -> None:
        """The sink did not take these: it believes what it did before."""
        for entry, _, _ in changes:
            entry.told -= 1
            if self.entries.get(entry.key) is entry:
                self._reap(entry)

    def _task(self, run: list[Change], epoch: int) -> FlushTask:
        first, last = run[0].entry, run[-1].entry
        residency = Residency.RESIDENT if run[0].resident else Residency.GONE
        keys = b"".join(change.entry.key for change in run)
        return FlushTask(
            path_tokens(last),
            first.depth - 1,
            len(run),
            keys,
            first.parent_key,
            residency,
            Tier(run[0].bit),
            last.reason,
            epoch,
        )

    def believed(self, sink: int) -> Iterator[tuple[bytes, int]]:
        """What a sink believes: names and sets of tiers."""
        return ((key, entry.believed[sink]) for key, entry in self.entries.items() if entry.believed[sink])

    def check(self) -> None:
        """AssertionError if counts and differences are not what the entries say."""
        children: dict[bytes, int] = {}
        for entry in self.entries.values():
            if entry.parent is not None:
                assert self.entries.get(entry.parent.key) is entry.parent, "an entry's parent is gone"
                children[entry.parent.key] = children.get(entry.parent.key, 0) + 1
        for key, entry in self.entries.items():
            assert entry.children == children.get(key, 0), "child counts disagree"
            assert entry.truth or entry.children or entry.told or any(entry.believed), "an entry that nothing keeps"
            for sink, dirty in enumerate(self.dirty):
                assert (self.due(entry, sink) != entry.believed[sink]) == (key in dirty), "a difference nobody noticed"


def path_tokens(entry: Entry) -> bytes:
    """The complete token path from the root to a block."""
    parts: list[bytes] = []
    node: Entry | None = entry
    while node is not None:
        parts.append(node.tokens)
        node = node.parent
    parts.reverse()
    return b"".join(parts)


def runs(changes: list[Change]) -> list[list[Change]]:
    """Join changes that are alike (tier, reason) along parent chains; a branch point splits. Each run is in path order."""
    by_key = {(change.entry.key, change.bit): change for change in changes}
    heirs: dict[tuple[bytes, int], int] = {}
    for entry, bit, _ in changes:
        if entry.parent is not None:
            heirs[entry.parent.key, bit] = heirs.get((entry.parent.key, bit), 0) + 1

    def goes_on(parent: Entry, child: Change) -> bool:
        above = by_key.get((parent.key, child.bit))
        return above is not None and heirs[parent.key, child.bit] == 1 and above.entry.reason is child.entry.reason

    joined: dict[tuple[bytes, int], Change] = {}
    heads: list[Change] = []
    for change in changes:
        parent = change.entry.parent
        if parent is not None and goes_on(parent, change):
            joined[parent.key, change.bit] = change
        else:
            heads.append(change)
    result: list[list[Change]] = []
    for head in heads:
        run, nxt = [head], joined.get((head.entry.key, head.bit))
        while nxt is not None:
            run.append(nxt)
            nxt = joined.get((nxt.entry.key, nxt.bit))
        result.append(run)
    return result
