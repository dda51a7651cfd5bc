"""Hints are checked in the caller."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvactors import Hints


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("priority", True, TypeError),
        ("priority", 0.5, TypeError),
        ("priority", 3, ValueError),
        ("priority", -3, ValueError),
        ("ttl", math.nan, ValueError),
        ("ttl", math.inf, ValueError),
        ("ttl", 0, ValueError),
        ("ttl", -1.0, ValueError),
        ("ttl", False, TypeError),
        ("ttl", "1", TypeError),
        ("pin", 1, TypeError),
        ("pin", None, TypeError),
        ("session_ends", 0, TypeError),
        ("returns_in", math.nan, ValueError),
        ("returns_in", np.bool_(True), TypeError),
    ],
)
def test_a_wrong_hint_is_refused_by_name(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"hints.{field}"):
        Hints(**{field: value})


def test_a_session_that_ends_does_not_return() -> None:
    with pytest.raises(ValueError, match="returns_in"):
        Hints(session_ends=True, returns_in=1.0)


def test_every_field_is_accepted_in_its_range() -> None:
    for priority in range(-2, 3):
        assert Hints(priority=priority, ttl=0.5, pin=True, returns_in=3).priority == priority
    assert Hints(session_ends=True).session_ends
