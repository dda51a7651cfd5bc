"""Checks of a ledger in steps, between which anything may happen.

What one entry shows by itself is checked of every entry. What needs all entries at once (counts) is
compared at the end, if nothing has changed since the beginning: on a system at rest that is always
so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from kvactors.flush_notifier.runs import UNSURE, Entry, Steps, counts
from kvactors.flush_notifier.scopes import above_first
from kvactors.flush_notifier.view import SHIFT, SinkView
from kvactors.types import ALL_TIERS, Tier

Tiers = Mapping[Tier, AbstractSet[bytes]]

TIERS, DEVICE = int(ALL_TIERS), int(Tier.DEVICE)

if TYPE_CHECKING:
    from kvactors.flush_notifier.ledger import Ledger


def check_steps(ledger: Ledger) -> Iterator[None]:
    """AssertionError if counts and differences are not what the entries say."""
    version = ledger.version
    children: Counter[bytes] = Counter()
    entries: list[Entry] = []
    dirty = [0] * len(ledger.dirty)
    remembered = 0
    for i, entry in enumerate(ledger.order.up_to(ledger.order.last_number), 1):
        _check_entry(ledger, entry)
        if version == ledger.version:
            if entry.parent is not None:
                children[entry.parent.key] += 1
            entries.append(entry)
            remembered += entry in ledger.limbo
            for sink, differing in enumerate(ledger.dirty):
                dirty[sink] += entry in differing
        if not i % ledger.step:
            yield
    yield from _check_counts(ledger, version, entries, children)
    if version == ledger.version:
        _require(len(entries) == len(ledger.entries), "an entry without a place in the order")
        _require(
            dirty == [len(differing) for differing in ledger.dirty],
            "a difference of a block that is not there",
        )
        _require(remembered == len(ledger.limbo), "a block remembered and forgotten")
        forgetting = ledger.trimming or ledger.settling
        _require(forgetting or remembered <= ledger.limbo_bound, "too many blocks remembered")


def _check_counts(
    ledger: Ledger, version: int, entries: list[Entry], children: Counter[bytes]
) -> Iterator[None]:
    for i, (key, tiers) in enumerate(_items(ledger.unnamed), 1):
        if version != ledger.version:
            return
        _require(bool(tiers), "an unnamed block that is nowhere")
        _require(key not in ledger.entries, "a named block among the unnamed")
        _require(
            not (fault := ledger.waiting.fault(key, ledger) if key in ledger.waiting else ""), fault
        )
        if not i % ledger.step:
            yield
    _require(len(ledger.waiting.blocks) <= len(ledger.unnamed), "a block waits that is nowhere")
    for i, entry in enumerate(entries, 1):
        if version != ledger.version:
            return
        _require(entry.children == children[entry.key], "child counts disagree")
        if not i % ledger.step:
            yield


def _items(unnamed: dict[bytes, int]) -> Iterator[tuple[bytes, int]]:
    """Items of a dict that may change between two of them: then there are no more."""
    items = iter(unnamed.items())
    while True:
        try:
            yield next(items)
        except (StopIteration, RuntimeError):
            return


def _check_entry(ledger: Ledger, entry: Entry) -> None:
    _require(ledger.entries.get(entry.key) is entry, "an entry under another key")
    if entry.parent is not None:
        _require(ledger.entries.get(entry.parent.key) is entry.parent, "an entry's parent is gone")
        _require(entry.parent.children > 0, "a parent that does not count its child")
    _require(
        entry.children or not entry.idle() or entry in ledger.limbo, "an entry that nothing keeps"
    )
    for sink, dirty in enumerate(ledger.dirty):
        state, due = entry.states[sink], entry.dues[sink]
        if (due != state) != (entry in dirty) and not (entry.held and ledger.settling):
            raise AssertionError("a difference that is not pending, or none that is")
        if due != ledger.due(entry, sink) and not ledger.spreading:
            raise AssertionError("what is due of a block is not what the block above makes it")
        if entry.parent is not None and not ledger.settling:
            below, above = state | state >> UNSURE, entry.parent.states[sink]
            above |= above >> UNSURE
            if (below & TIERS and not above & TIERS) or below & ~above & DEVICE:
                raise AssertionError(
                    "a sink's view has a block without the block above it, see Ledger"
                )
        sent = state and ledger.views[sink].by_tokens
        _require(
            entry.by_tokens or not sent,
            "a sink addressed by tokens was sent a block that tokens do not identify",
        )


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def divergence_steps(
    ledger: Ledger, sinks: Collection[int], mirrors: Mapping[int, Tiers], tiers: Tiers
) -> Steps[int]:
    """Blocks on which the view of one of the sinks and the tiers differ. A view should have the
    closed truth: each tier that holds a block, as far as the tree rule of `Ledger` allows. mirrors:
    of the sinks that keep an account of their views; the account of the others is the ledger's.
    What changes between two steps may or may not count: compare at rest."""
    differing: set[bytes] = set()
    looked = 0
    for sink in sinks:
        mirror, found = mirrors.get(sink), 0
        for entry, due in due_of(ledger, ledger.views[sink], tiers):
            looked += 1
            if not looked % ledger.step:
                yield
            key = entry.key
            held = entry.states[sink] & TIERS if mirror is None else tiers_of(mirror, key)
            found += held.bit_count()
            if due != held:
                differing.add(key)
        if mirror is not None and found != sum(map(len, mirror.values())):
            for keys in mirror.values():  # blocks without an entry in the ledger
                for key in list(keys):
                    looked += 1
                    if not looked % ledger.step:
                        yield
                    if key not in ledger.entries:
                        differing.add(key)
    return len(differing)


def due_of(ledger: Ledger, view: SinkView, tiers: Tiers) -> Iterator[tuple[Entry, int]]:
    """Every block of which a path is known, parents before children, and the set of tiers on which
    it is announceable to a sink of this view, if `tiers` hold what they hold."""
    closed, expected = view.closed(), dict[bytes, int]()
    for entry in ledger.order.up_to(ledger.order.last_number):
        above = (
            above_first(ledger.root_of, entry)
            if entry.parent is None
            else expected.get(entry.parent.key, 0)
        )
        due = closed[above << SHIFT | tiers_of(tiers, entry.key)] if counts(entry, view) else 0
        if due:
            expected[entry.key] = due
        yield entry, due


def tiers_of(tiers: Tiers, key: bytes) -> int:
    """The set of tiers that hold a block."""
    held = 0
    for tier, keys in tiers.items():
        if key in keys:
            held |= tier
    return held
