"""What a benchmark reports: rows of ours beside a limit, and their ratio. A higher ratio is better in every row."""

from __future__ import annotations

from typing import Any, TypedDict

from rich.console import Console
from rich.table import Table


class Row(TypedDict):
    """ours, limit: measured in one run (or a named bar), both in `unit`. ratio: above 1 where ours is better than the limit."""

    case: str
    ours: float
    limit: float
    ratio: float
    unit: str
    limit_name: str


class Bench(TypedDict):
    """A whole report. settings: what was measured, and how much of it."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]


def more_is_better(case: str, ours: float, limit: float, unit: str, limit_name: str) -> Row:
    """A row about a rate."""
    return Row(
        case=case, ours=round(ours, 4), limit=round(limit, 4), ratio=round(ours / limit, 4), unit=unit, limit_name=limit_name
    )


def less_is_better(case: str, ours: float, limit: float, unit: str, limit_name: str) -> Row:
    """A row about a time."""
    return Row(
        case=case, ours=round(ours, 4), limit=round(limit, 4), ratio=round(limit / ours, 4), unit=unit, limit_name=limit_name
    )


def print_bench(bench: Bench, console: Console) -> None:
    """The report as a table."""
    table = Table(title=bench["name"])
    for title in ("case", "ours", "limit", "ratio", "unit", "limit is"):
        table.add_column(title, justify="right" if title in ("ours", "limit", "ratio") else "left")
    for row in bench["rows"]:
        table.add_row(
            row["case"], number(row["ours"]), number(row["limit"]), f"{row['ratio']:.2f}", row["unit"], row["limit_name"]
        )
    console.print(table)
    console.print("  ".join(f"{key} {value}" for key, value in bench["settings"].items()), style="dim")


def number(value: float) -> str:
    """Four significant digits, grouped by thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
