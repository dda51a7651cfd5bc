"""Tables between the markers of a page. The text around them is written by hand.

A table stands between `<!-- table NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.benchmarks.report import number

MARK = re.compile(r"<!-- table (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
HEAD = ("| case | ours | limit | ratio | unit | limit is |", "|---|---:|---:|---:|---|---|")
HIDDEN = {"quick", "vllm", "sglang"}
"""Settings that the lines below a table leave out: peers are named by their versions."""


def names_of(page: str) -> list[str]:
    """The tables that a page has places for, in its order."""
    return [found[1] for found in MARK.finditer(page)]


def filled(page: str, records: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the tables of these records. Other tables stay as they are.

    Raises:
        ValueError: the page has no place for a table, or two.
    """
    places = names_of(page)
    for name in records:
        if places.count(name) != 1:
            raise ValueError(
                f"the page has {places.count(name)} places for the table {name!r}, not one: put "
                f"<!-- table {name} --> and <!-- end {name} --> on two lines of it"
            )

    def put(found: re.Match[str]) -> str:
        name = found[1]
        if name not in records:
            return found[0]
        return f"<!-- table {name} -->\n{table(records[name])}<!-- end {name} -->"

    return MARK.sub(put, page)


def table(record: Mapping[str, Any], *, own_machine: bool = True) -> str:
    """The rows of a record, and the lines below them. own_machine: name the machine there."""
    report = record["report"]
    lines = ["", *HEAD]
    for row in report["rows"]:
        cells = (
            row["case"],
            number(row["ours"]),
            number(row["limit"]),
            f"{row['ratio']:.2f}",
            row["unit"],
            row["limit_name"],
        )
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    for line in below(record)[: None if own_machine else -1]:
        lines += ["", line]
    return "\n".join([*lines, "", ""])


def below(record: Mapping[str, Any]) -> list[str]:
    """The lines below a table: rows that are not met, settings, and the machine."""
    report = record["report"]
    less = [row for row in report["rows"] if row["ratio"] < 1]
    lines = [f"{len(less)} of {len(report['rows'])} rows are below 1."]
    settings = report.get("settings", {})
    if settings.get("quick"):
        lines.append("A quick run, which proves nothing about speed.")
    shown = {key: value for key, value in settings.items() if key not in HIDDEN}
    brief = [
        f"{key} {number(value) if isinstance(value, float) else value}"
        for key, value in shown.items()
        if isinstance(value, (int, float)) or (isinstance(value, str) and " " not in value)
    ]
    if brief:
        lines.append(", ".join(brief) + ".")
    for key, value in shown.items():
        if isinstance(value, str) and " " in value:
            lines.append(f"{key}: {value}.")
    lines.append(origin(record))
    return lines


def origin(record: Mapping[str, Any]) -> str:
    """When and on which machine a record was taken."""
    machine = record.get("machine")
    if not machine:
        return "The machine was not recorded."
    peers = ", ".join(f"{name} {version}" for name, version in record["peers"].items())
    return (
        f"{record['date']}: {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory']}, {machine['disk']}, {machine['kernel']}, Python "
        f"{machine['Python']}, kvactors {machine['kvactors']}, "
        f"{f'beside {peers}' if peers else 'no peer'}. Load average at the start "
        f"{record['load']:.1f}, {record['seconds']:.0f} s."
    )
