"""Texts of a report's summary."""

from __future__ import annotations

import pytest

from kvactors.scenario.report import count_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (100_000, "100,000"),
        (1_629_400, "1,629,400"),
        (1 << 40, "1,099,511,627,776"),
        (3_210_860.0, "3,210,860"),
        (0.25, "0.25"),
        (0.123456789, "0.123457"),
    ],
)
def test_counts_are_shown_in_full(value, text):
    assert count_text(value) == text
