"""docs/testing_your_loop.md is carried out: files are written, changes applied, commands run, and
their output is the documented one."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kvactors
from kvactors.testing import Sim, plugin

assert Sim, (
    plugin
)  # imported before the inner sessions begin: what they import is forgotten after them, and numpy comes only once

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "testing_your_loop.md"
OPTIONS = ("-p", "kvactors.testing", "-p", "no:hypothesispytest", "-p", "no:cacheprovider")
OPTIONS += (
    "-o",
    "asyncio_default_fixture_loop_scope=function",
    "-W",
    "ignore::ResourceWarning",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)


class Block(NamedTuple):
    """A fenced block: its language, the file it is about, its text."""

    kind: str
    file: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    for found in re.finditer(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield Block(found[1], found[2] or "", found[3])


def patched(text: str, change: str) -> str:
    """The text with a change applied, whose context and removed lines must stand in it once."""
    lines = change.splitlines()
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    after = "\n".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"the change does not fit:\n{change}"
    return text.replace(before, after)


def plain(line: str) -> str:
    """A line without its numbers, digests and widths, which another version may change."""
    return re.sub(
        r"\d[\d.]*", "N", re.sub(r":[0-9a-f]{8}\b", ":K", re.sub(r"\s+", " ", line.strip()))
    )


def missing(said: str, printed: list[str]) -> str | None:
    """The first line of what the page shows that was not printed, in order; None if all were.

    A line that ends in ` ...` is only the beginning of one."""
    rest = iter([plain(line) for line in printed])
    for line in said.splitlines():
        if line in ("", "..."):
            continue
        start = plain(line.removesuffix(" ..."))
        if not any(
            one.startswith(start) if line.endswith(" ...") else one == start for one in rest
        ):
            return line
    return None


class Reader:
    """Carries out the page's steps."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.replay: list[str] = []
        self.outcomes: list[dict[str, int]] = []

    def do(self, block: Block) -> None:
        path = self.pytester.path / block.file
        if block.kind == "python":
            path.write_text(block.text)
        elif block.kind == "diff":
            path.write_text(patched(path.read_text(), block.text))
        elif block.kind == "console":
            command, said = block.text.removeprefix("$ ").split("\n", 1)
            lines = self.run(shlex.split(command))
            absent = missing(said, lines)
            assert absent is None, f"{command!r} did not print {absent!r} where the page has it"

    def run(self, command: list[str]) -> list[str]:
        if command[0] == "python":
            return self.pytester.run(sys.executable, *command[1:]).outlines
        arguments = command[1:]
        if "--kv-seed" in arguments:  # the page's seed may be another version's
            assert self.replay, "nothing has failed that could be replayed"
            arguments = ["-q", *self.replay]
        result = self.pytester.runpytest_inprocess(*OPTIONS, *arguments)
        found = [line for line in result.outlines if "; replay it: pytest " in line]
        if found:
            self.replay = shlex.split(found[0].split("replay it: pytest ")[1])
        self.outcomes.append(result.parseoutcomes())
        return result.outlines


@pytest.mark.ci
def test_the_tutorial_is_true(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(kvactors.__file__).parents[1]))
    monkeypatch.syspath_prepend(pytester.path)
    page = list(blocks(PAGE.read_text("utf-8")))
    assert [block.kind for block in page].count("console") == 6
    reader = Reader(pytester)
    for block in page:
        reader.do(block)
    buggy, replayed, fixed, trouble, rest = reader.outcomes
    assert buggy["failed"]
    assert replayed == {"failed": 1}
    assert fixed == {"passed": 10}
    assert trouble == {"passed": 20}
    assert rest == {"passed": 6}
