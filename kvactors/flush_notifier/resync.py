"""How fast a sink is sent again what it was sent, for an index that may have lost its state (see
`batches.repeat`)."""

from __future__ import annotations

LONGEST_PAUSE = 1.0
"""Seconds between two steps of a slow repetition at most."""

SHORTEST_PAUSE = 0.005
"""The same at least."""


def pause(interval: float, blocks: int, step: int) -> float:
    """Seconds between the steps of a repetition that comes every `interval` seconds: it takes about
    half of that."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, interval * step / (2 * max(1, blocks))))
