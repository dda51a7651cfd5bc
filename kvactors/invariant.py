"""Checks of invariants that also hold under `python -O`, which removes `assert`."""

from __future__ import annotations


def ensure(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with the text `otherwise` unless an invariant holds."""
    if not holds:
        raise AssertionError(otherwise)
