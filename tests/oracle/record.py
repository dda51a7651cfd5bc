"""The counts and violations of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SHOWN = 20

SHARING = (
    "forked",
    "forks of a fork",
    "tails verified",
    "hints",
    "pinned",
    "pins refused",
    "pins expired",
    "pins looked up",
    "unpinned",
    "outcome quota ok",
    "evictions watched",
    "evictions by a quota",
    "host evictions watched",
    "host evictions by a quota",
    "store evictions watched",
    "store evictions by a quota",
    "outcome clear salt ok",
    "clear salt and storage",
    "clear salt compared",
    "outcome clear lora ok",
    "clear lora compared",
    "blocks of windows verified",
    "blocks of windows verified of hits",
    "states verified",
    "states verified of hits",
    "hits of groups host",
    "hits of groups storage",
    "groups without room",
    "slept 1",
    "slept 2",
)
"""Counted also where they never happened: forks, hints, pins, quotas, clears of a salt, groups of
layers, sleeps."""


@dataclass
class Record:
    """failures: each different one once, with the world it was found in. wrong: blocks that held
    other bytes. seen: what was reached."""

    requests: int = 0
    finished: int = 0
    verified: int = 0
    wrong: int = 0
    restarts: int = 0
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def reached(self) -> dict[str, int]:
        """The counts of `seen`, and 0 for those of `SHARING` without an entry."""
        return dict(sorted({**dict.fromkeys(SHARING, 0), **self.seen}.items()))

    def fail(self, what: str) -> None:
        """One failure."""
        self.failed += 1
        if what not in self.failures and len(self.failures) < SHOWN:
            self.failures.append(what)

    def add(self, other: Record) -> None:
        """Add the counts of another record."""
        for name in ("requests", "finished", "verified", "wrong", "restarts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        failed = other.failed
        for what in other.failures:
            self.fail(what)
            failed -= 1
        self.failed += failed
        self.seen.update(other.seen)
