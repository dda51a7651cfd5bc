"""What a ledger sends to a sink next, and what the end of a delivery, or a sink that lost its
state, means for it. In steps of at most `Ledger.step` blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvactors.flush_notifier.runs import UNSURE, Batch, Entry, Steps, as_task, clear_task
from kvactors.flush_notifier.selection import Selection, runs_of
from kvactors.types import ALL_TIERS

if TYPE_CHECKING:
    from kvactors.flush_notifier.ledger import Ledger

TIERS = int(ALL_TIERS)


def taking(ledger: Ledger, sink: int, limit: int, epoch: int) -> Steps[Batch]:
    """The next differences of a sink, about `limit` blocks, in the order of `selection.ordered`;
    they are in delivery until `delivered` or `refused`. No fact may come between the steps."""
    if sink in ledger.cleared:
        ledger.cleared.discard(sink)
        if ledger.dirty[sink]:
            return Batch(
                [clear_task(ledger.views[sink].tiers, epoch)], [], ledger.order.last_number
            )
    selection = Selection(ledger.dirty[sink], sink, limit, ledger.step)
    yield from selection.steps()
    by_name = sink in ledger.by_name
    paths = None if by_name else limit
    runs = yield from runs_of(
        selection, node=ledger.views[sink].node, paths=paths, step=ledger.step
    )
    tasks = []
    for run in runs:
        tasks.append((yield from as_task(run, epoch, by_name=by_name, step=ledger.step)))
        for i, entry in enumerate(run.entries, 1):
            entry.held += 1
            if not i % ledger.step:
                yield
    return Batch(tasks, runs)


def delivering(ledger: Ledger, sink: int, batch: Batch) -> Steps[None]:
    """The sink took these: they are its view now, whatever has become true since. Of a clear: what
    has come back since differs."""
    ledger.version += 1
    ledger.settling += 1
    dirty = ledger.dirty[sink]
    sent: dict[Entry, int] = {}
    looked = 0
    for entries, bit, resident, _ in batch.runs:
        settled, view = ~(bit | bit << UNSURE), bit if resident else 0
        for entry in entries if resident else reversed(entries):
            entry.states[sink] = entry.states[sink] & settled | view
            sent[entry] = sent.get(entry, 0) | bit | bit << UNSURE
            looked += 1
            if not looked % ledger.step:
                yield
    for i, (entry, bits) in enumerate(sent.items(), 1):
        if not (entry.dues[sink] ^ entry.states[sink]) & ~bits:
            dirty.pop(entry, None)  # if it differs again in what was sent, that began later
        if not i % ledger.step:
            yield
    for i, entry in enumerate(ledger.order.up_to(batch.cleared), 1):
        if entry.states[sink]:
            entry.states[sink] = 0
            dirty.pop(entry, None)
            ledger.compare(entry, sink)
        if not i % ledger.step:
            ledger.version += 1
            yield from ledger.trim()
            yield
    yield from _end(ledger, sink, batch)


def refusing(ledger: Ledger, sink: int, batch: Batch) -> Steps[None]:
    """No answer, or a bad one. The sink may have taken any of these all the same: they are sent
    again, whatever is true then."""
    ledger.version += 1
    ledger.settling += 1
    if batch.cleared:
        ledger.cleared.add(sink)
    for i, entry in enumerate(ledger.order.up_to(batch.cleared), 1):
        if entry.states[sink]:
            entry.states[sink] |= (entry.states[sink] & TIERS) << UNSURE
            ledger.compare(entry, sink)
        if not i % ledger.step:
            yield
    looked = 0
    for run in batch.runs:
        for entry in run.entries:
            entry.states[sink] |= run.bit << UNSURE
            looked += 1
            if not looked % ledger.step:
                yield
    yield from _end(ledger, sink, batch)


def _end(ledger: Ledger, sink: int, batch: Batch) -> Iterator[None]:
    looked = 0
    for run in batch.runs:
        for entry in run.entries:
            ledger.compare(entry, sink)
            looked += 1
            if not looked % ledger.step:
                yield
    for run in batch.runs:
        for entry in reversed(run.entries):  # the deepest first: they are to be forgotten first
            ledger.let_go(entry)
            looked += 1
            if not looked % ledger.step:
                ledger.version += 1
                yield
    ledger.version += 1
    ledger.settling -= 1
    yield from ledger.trim()


def forget(ledger: Ledger, sink: int) -> Iterator[None]:
    """The sink's index is empty, and no delivery to it is in flight: everything that is due is sent
    again. No fact comes between the steps."""
    ledger.version += 1
    ledger.settling += 1
    ledger.cleared.discard(sink)
    for i, entry in enumerate(ledger.order.up_to(ledger.order.last_number), 1):
        if entry.states[sink]:
            entry.states[sink] = 0
            ledger.compare(entry, sink)
        if not i % ledger.step:
            ledger.version += 1
            yield from ledger.trim()
            yield
    ledger.version += 1
    ledger.settling -= 1
    yield from ledger.trim()


def repeat(ledger: Ledger, sink: int) -> Iterator[None]:
    """The sink's index may have lost any of what it was sent: all that is in the sink's view is
    sent again, what is above a block before the block. Anything may happen between the steps, and
    nothing is removed from the index first."""
    for i, entry in enumerate(ledger.order.up_to(ledger.order.last_number), 1):
        if tiers := entry.states[sink] & TIERS:
            ledger.version += 1
            entry.states[sink] |= tiers << UNSURE
            ledger.compare(entry, sink)
        if not i % ledger.step:
            yield
