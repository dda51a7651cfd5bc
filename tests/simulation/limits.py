"""Limits that are constants of the package, made small for one run: what grows past them in weeks
does so in a few requests."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

OVERTAKINGS = "requests that overtake one"
"""The bound of the law of progress, see `tests.support.progress_watch`."""

LIMITS: Mapping[str, tuple[str, str]] = {
    "messages of a turn": ("kvactors.actor.loop", "TURN_BUDGET"),
    "blocks forgotten": ("kvactors.system", "FORGOTTEN_BLOCKS"),
    "objects of a write": ("kvactors.cpu_evictor.memory", "WRITE_BATCH"),
    "batches at the store": ("kvactors.storage.actors", "BATCHES_IN_FLIGHT"),
    "names of a report": ("kvactors.storage.actors", "REPORT_PAGE"),
    "blocks of a page of paths": ("kvactors.storage.actors", "PATH_PAGE"),
    "stored blocks waiting": ("kvactors.flush_notifier.ledger", "MAX_WAITING_ORPHANS"),
    "saves waiting": ("kvactors.storage.device_store", "WAITING"),
    "scopes remembered": ("kvactors.prefix_index.reports", "REMEMBERED_SCOPES"),
    "blocks of a turn": ("kvactors.prefix_index.work", "TURN_BLOCKS"),
    "requests observed first": ("kvactors.prefix_index.settings", "OBSERVED_REQUESTS"),
    "blocks of a window": ("kvactors.cpu_evictor.memory", "WINDOW"),
    OVERTAKINGS: ("kvactors.prefix_index.waiting", "OVERTAKEN"),
}
"""By name: the module and the constant. The constant is read when it is used, so that replacing it
has an effect."""

STEP = "blocks of a flush step"
"""The one that each FlushNotifier's ledger has for itself."""


def draw_limit(rng: random.Random, low: int = 1, high: int = 64) -> int:
    """A limit from `low` to `high`, every magnitude as likely as the others."""
    return min(high, int(low * (high / low + 1) ** rng.random()))


def draw_limits(rng: random.Random) -> dict[str, int]:
    """One of each, from 1 to 64."""
    return {name: draw_limit(rng) for name in (*LIMITS, STEP)}


@contextmanager
def limited(limits: Mapping[str, int]) -> Iterator[None]:
    """Replace the constants within a block. AttributeError if one does not exist."""
    places = {
        name: (importlib.import_module(module), constant)
        for name, (module, constant) in LIMITS.items()
    }
    before = {name: getattr(module, constant) for name, (module, constant) in places.items()}
    try:
        for name, (module, constant) in places.items():
            vars(module)[constant] = limits.get(name, before[name])
        yield
    finally:
        for name, (module, constant) in places.items():
            vars(module)[constant] = before[name]
