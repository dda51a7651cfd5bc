"""Checks of a ledger in steps, between which anything may happen.

What one entry shows by itself is checked of every entry. What needs all entries at once (counts) is compared at the end, if nothing has
changed since the beginning: on a system at rest that is always so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from kvactors.flush_notifier.runs import Entry, Steps
from kvactors.units import Tier

Tiers = Mapping[Tier, AbstractSet[bytes]]

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
        _require(dirty == [len(differing) for differing in ledger.dirty], "a difference of a block that is not there")
        _require(remembered == len(ledger.limbo), "a block remembered and forgotten")
        forgetting = ledger.trimming or ledger.settling
        _require(forgetting or remembered <= ledger.limbo_bound, "too many blocks remembered")


def _check_counts(ledger: Ledger, version: int, entries: list[Entry], children: Counter[bytes]) -> Iterator[None]:
    for i, (key, tiers) in enumerate(_items(ledger.unnamed), 1):
        if version != ledger.version:
            return
        _require(bool(tiers), "an unnamed block that is nowhere")
        _require(key not in ledger.entries, "a named block among the unnamed")
        if not i % ledger.step:
            yield
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
    _require(entry.children or not entry.idle() or entry in ledger.limbo, "an entry that nothing keeps")
    for sink, dirty in enumerate(ledger.dirty):
        differs = ledger.due(entry, sink) != entry.states[sink]
        if differs != (entry in dirty) and not (entry.held and ledger.settling):
            raise AssertionError("a difference that is not pending, or none that is")
        sent = entry.states[sink] and ledger.views[sink].by_tokens
        _require(entry.by_tokens or not sent, "a sink addressed by tokens was sent a block that tokens do not identify")


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def divergence_steps(
    ledger: Ledger, sinks: Collection[int], mirrors: Mapping[int, Mapping[bytes, int]], tiers: Tiers
) -> Steps[int]:
    """Blocks on which the view of one of the sinks and the tiers differ. mirrors: the views of those that can be asked, of the others what
    they were sent and took counts. What changes between two steps may or may not count: compare at rest."""
    tiers_of: dict[bytes, int] = {}
    looked = 0
    for tier, keys in tiers.items():
        bit = int(tier)
        for key in keys:
            tiers_of[key] = tiers_of.get(key, 0) | bit
            looked += 1
            if not looked % ledger.step:
                yield
    differing: set[bytes] = set()
    for sink in sinks:
        view, table, mirror = ledger.views[sink], ledger.views[sink].table(), mirrors.get(sink)
        held: Mapping[bytes, int] = mirror if mirror is not None else (yield from _views(ledger, sink))
        for keys_of in (tiers_of, held):
            for key in keys_of:
                looked += 1
                if not looked % ledger.step:
                    yield
                entry, expected, has = ledger.entries.get(key), table[tiers_of.get(key, 0)], held.get(key, 0)
                if view.by_tokens and entry is not None and not entry.by_tokens:
                    expected = 0
                if view.at_finish and entry is not None and not entry.finished:
                    expected &= has
                if expected != has and (entry is not None or key in held):
                    differing.add(key)
    return len(differing)


def _views(ledger: Ledger, sink: int) -> Steps[dict[bytes, int]]:
    found: dict[bytes, int] = {}
    for i, (key, tiers) in enumerate(ledger.view(sink), 1):
        found[key] = tiers
        if not i % ledger.step:
            yield
    return found
