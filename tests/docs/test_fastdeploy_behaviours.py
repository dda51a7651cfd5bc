"""Pages name tests that are there. Those of FastDeploy's behaviours run, and each scenario of
FastDeploy's own tests has one of them, or a reason why not."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fastdeploy_behaviours.md").read_text("utf-8")
SCENARIOS = tomllib.loads(Path(__file__).with_name("fastdeploy_scenarios.toml").read_text("utf-8"))
NOT_HELD = "Not held here"
NO_REASON = "not held: "
SKIPS = re.compile(r"\b(skip|skipif|xfail)\b")


class Row:
    """An item of a list, or a row of the table of reasons. `file`: of the section, below tests/,
    None for the reasons."""

    def __init__(self, line: str, file: str | None) -> None:
        self.behaviour, _, self.reason = (
            cell.strip() for cell in line.strip("|* ").partition(" | ")
        )
        self.file = file
        self.tests = re.findall(r"`(test_\w+)`", line)


def rows() -> list[Row]:
    found = []
    for section in PAGE.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        files = re.findall(r"`([\w/]+\.py)`", heading)
        assert len(files) == (heading != NOT_HELD), f"{heading!r} names {files}"
        lines = re.findall(r"^\* .+" if files else r"^\| .+", body, re.MULTILINE)
        lines = lines if files else lines[1:]
        assert lines, f"{heading!r} has no row"
        found += [Row(line, files[0] if files else None) for line in lines]
    return found


def always_run(code: str) -> dict[str, bool]:
    """The functions of a test file, and whether each always runs: it is marked neither as skipped
    nor as an expected failure."""
    return {
        node.name: not any(SKIPS.search(ast.unparse(one)) for one in node.decorator_list)
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@cache
def functions_of(file: str) -> dict[str, bool]:
    return always_run((ROOT / "tests" / file).read_text("utf-8"))


def test_pages_name_tests_that_are_there() -> None:
    files = [file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in files for name in re.findall(r"def (test_\w+)", text)}
    named = {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"`(test_\w+)`", page.read_text("utf-8"))
    }
    assert named <= there, named - there


def test_every_row_names_tests_that_run_or_a_reason() -> None:
    for row in rows():
        if row.file is None:
            assert row.reason, f"no reason for {row.behaviour!r}"
            continue
        assert row.tests, f"no test of {row.behaviour!r}"
        for name in row.tests:
            assert functions_of(row.file).get(name), f"{row.file}::{name}"


@pytest.mark.parametrize("subject", SCENARIOS)
def test_every_scenario_has_a_test_of_the_page_or_a_reason(subject: str) -> None:
    named = {name for row in rows() for name in row.tests if row.file}
    reasons = [row.behaviour for row in rows() if row.file is None]
    for scenario, held in SCENARIOS[subject].items():
        if isinstance(held, str):
            assert held.startswith(NO_REASON), scenario
            beginning = held.removeprefix(NO_REASON)
            assert [one for one in reasons if one.startswith(beginning)], scenario
        else:
            assert held, scenario
            assert not set(held) - named, scenario
