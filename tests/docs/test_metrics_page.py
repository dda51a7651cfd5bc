"""The page of statistics and metrics is the one that is generated."""

from __future__ import annotations

from pathlib import Path

from kvactors.observe.reference import render

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_of_metrics_is_current():
    hint = "run: python -m kvactors.observe.reference > docs/metrics.md"
    assert PAGE.read_text("utf-8") == render(), hint
