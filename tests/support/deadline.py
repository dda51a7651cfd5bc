"""Absolute deadlines of tests."""

from __future__ import annotations

from kvactors.actor.clock import now


def deadline_after(seconds: float) -> float:
    """The loop's time `seconds` from now."""
    return now() + seconds
