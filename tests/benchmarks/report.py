"""Benchmark reports: rows of kvactors' figures beside a limit, and their ratio. A higher ratio
is better in every row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console

from kvactors.scenario.output import print_details, print_rows


class Row(msgspec.Struct, frozen=True):
    """ours, limit: measured in one run (or a named bar), both in `unit`. ratio: above 1 where ours
    is better than the limit."""

    case: str
    ours: float
    limit: float
    ratio: float
    unit: str
    limit_name: str


def rate_row(case: str, ours: float, limit: float, unit: str, limit_name: str) -> Row:
    """A row in which more is better."""
    return Row(case, round(ours, 4), round(limit, 4), round(ours / limit, 4), unit, limit_name)


def time_row(case: str, ours: float, limit: float, unit: str, limit_name: str) -> Row:
    """A row in which less is better."""
    return Row(case, round(ours, 4), round(limit, 4), round(limit / ours, 4), unit, limit_name)


def bench_report(name: str, rows: list[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The report as builtins: {"name", "rows": [{"case", "ours", "limit", "ratio", "unit",
    "limit_name"}], "settings"}."""
    return {"name": name, "rows": msgspec.to_builtins(rows), "settings": dict(settings)}


def print_bench(report: Mapping[str, Any], console: Console) -> None:
    """The report as a table."""
    cells = (
        (
            row["case"],
            number(row["ours"]),
            number(row["limit"]),
            f"{row['ratio']:.2f}",
            row["unit"],
            row["limit_name"],
        )
        for row in report["rows"]
    )
    columns = ("case", "ours", "limit", "ratio", "unit", "limit is")
    rows = ((row, None) for row in cells)
    print_rows(str(report["name"]), columns, rows, console, numbers=range(1, 4))
    print_details("  ".join(f"{key} {value}" for key, value in report["settings"].items()), console)


def number(value: float) -> str:
    """Four significant digits, grouped by thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
