"""The planted bugs: each names a symbol, a change in it, and the tests that must notice the change.

`bugs/*.txt` hold them:

    NAME: what breaks
      SYMBOL TEST ...
      - code of the symbol
      + the code with the bug

A symbol is `function`, `Class`, `Class.method` or `CONSTANT`, in any module. Where two modules have
the same code under one name, the last parts of the module's name come before it. Code outside any
symbol, and a file that is not Python, is named by its path below the root. The code occurs exactly
once in the symbol. White space, line breaks, comments, trailing commas and the parentheses around a
wrapped expression do not count, so that a bug outlives the formatter.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from keyword import iskeyword
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent

TOKEN = re.compile(
    r"""(?P<space> \s+ | \\\n | \#[^\n]* )
    | [rbfuRBFU]{0,2} (?: \"{3} (?:\\.|[^\\])*? \"{3} | '{3} (?:\\.|[^\\])*? '{3}
                        | " (?:\\.|[^"\\\n])* " | ' (?:\\.|[^'\\\n])* ' )
    | \d [\w.]* (?: (?<=[eE]) [+-] \d+ )? | \w+
    | \.\.\. | -> | := | (?: \*\* | // | << | >> | [-+*/%&|^@=!<>] ) =? | .""",
    re.VERBOSE | re.DOTALL,
)


class Bug(NamedTuple):
    """A planted bug.

    Attributes:
        breaks: the resulting defect.
        symbol: what the bug is in, see the module.
        tests: arguments for pytest. One of these tests must fail.
        old: occurs exactly once in the symbol.
    """

    name: str
    breaks: str
    symbol: str
    tests: tuple[str, ...]
    old: str
    new: str


class Stale(Exception):
    """A bug that does not fit the code any more."""


class Place(NamedTuple):
    """The range of a symbol in a file, in characters."""

    file: Path
    start: int
    stop: int


class Tokens(NamedTuple):
    """The tokens of a source with their ranges, and the ranges of the parentheses that are not
    among them."""

    texts: list[str]
    starts: list[int]
    stops: list[int]
    wraps: list[tuple[int, int]]


def tokens(source: str) -> Tokens:
    """The tokens that count."""
    every = [(m[0], m.start(), m.end()) for m in TOKEN.finditer(source) if not m["space"]]
    partners: dict[int, int] = {}
    plain: set[int] = set()  # opening brackets that are more than a wrap
    opened: list[int] = []
    for i, (text, _, _) in enumerate(every):
        if text in "([{":
            before = every[i - 1][0] if i else ""
            if text != "(" or (re.match(r"[\w\"')\]}]", before[-1:]) and not iskeyword(before)):
                plain.add(i)
            opened.append(i)
        elif text in ")]}" and opened:
            partners[opened.pop()] = i
        elif opened and text in {",", "for", ":=", "yield"}:
            plain.add(opened[-1])
    wraps = {a: b for a, b in partners.items() if a not in plain and b > a + 1}
    trailing = {i for i in range(len(every) - 1) if every[i][0] == "," and every[i + 1][0] in ")]}"}
    left_out = trailing.union(wraps, wraps.values())
    kept = [token for i, token in enumerate(every) if i not in left_out]
    return Tokens(
        [text for text, _, _ in kept],
        [start for _, start, _ in kept],
        [stop for _, _, stop in kept],
        [(every[a][1], every[b][2]) for a, b in wraps.items()],
    )


@cache
def read(file: Path) -> tuple[str, Tokens]:
    """A file and its tokens."""
    source = file.read_text("utf-8")
    return source, tokens(source)


def named(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """The symbols of a module or a class."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from named(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + one.id, node) for one in targets if isinstance(one, ast.Name))
        else:
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from named(getattr(node, part, ()), prefix)


@cache
def places() -> dict[str, list[tuple[str, str, Place]]]:
    """The symbols of the package, and of the tools among the tests, by their last name: module,
    name in it, and place."""
    found = defaultdict(list)
    tools = [one for one in (ROOT / "tests").rglob("*.py") if not one.name.startswith("test_")]
    for file in sorted([*(ROOT / "kvactors").rglob("*.py"), *tools]):
        source = read(file)[0]
        lines = [0]
        for line in source.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for name, node in named(ast.parse(source).body):
            first = min(one.lineno for one in [node, *getattr(node, "decorator_list", ())])
            place = Place(file, lines[first - 1], lines[node.end_lineno or first])
            found[name.rpartition(".")[2]].append((module, name, place))
    return found


def places_of(symbol: str) -> list[Place]:
    """The places that a symbol may mean."""
    if "/" in symbol or symbol in {"pyproject.toml", "README.md"}:
        return [Place(ROOT / symbol, 0, len(read(ROOT / symbol)[0]))]
    return [
        place
        for module, name, place in places()[symbol.rpartition(".")[2]]
        if symbol == name
        or (symbol.endswith(f".{name}") and f"{module}.{name}".endswith(f".{symbol}"))
    ]


def occurrences(old: Sequence[str], place: Place) -> list[tuple[int, int]]:
    """Where a place has these tokens."""
    found = read(place.file)[1]
    first, last = bisect_left(found.starts, place.start), bisect_left(found.starts, place.stop)
    return [
        (found.starts[i], found.stops[i + len(old) - 1])
        for i in range(first, last - len(old) + 1)
        if found.texts[i] == old[0] and found.texts[i : i + len(old)] == old
    ]


def planted(bug: Bug) -> tuple[Path, str]:
    """The file of a bug, and its text with the bug in it. Stale if the old code does not occur
    exactly once, or nothing but words changes."""
    old = tokens(bug.old).texts
    found = {(place, at) for place in places_of(bug.symbol) for at in occurrences(old, place)}
    if len(found) != 1:
        raise Stale(
            f"{bug.name} is stale: its code occurs {len(found)} times in {bug.symbol}, not once"
        )
    ((place, (start, stop)),) = found
    source, all_tokens = read(place.file)
    for opening, closing in all_tokens.wraps:
        if start <= opening < stop < closing:
            stop = closing
        elif opening < start < closing <= stop:
            start = opening
    line = source.rfind("\n", 0, start) + 1
    indent = len(source[line:start]) - len(source[line:start].lstrip())
    new = bug.new
    if not source[line:start].strip():  # whole lines
        start, shift = line, indent - _indent(bug.old)
        new = "\n".join(" " * (_indent(one) + shift) + one.lstrip() for one in new.split("\n"))
    else:
        new = new.replace("\n", "\n" + " " * indent)
    mutated = source[:start] + new + source[stop:]
    if place.file.suffix == ".py":
        after = mutated[place.start : place.stop + len(mutated) - len(source)]
        try:
            same = _tree(after) == _tree(source[place.start : place.stop])
        except SyntaxError as error:
            raise Stale(
                f"{bug.name} is stale: {bug.symbol} is no Python with it ({error})"
            ) from error
        if same:
            raise Stale(f"{bug.name} changes nothing in {bug.symbol}")
    return place.file, mutated


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _tree(source: str) -> str:
    return ast.dump(ast.parse(f"if 1:\n{source}" if source.startswith(" ") else source))


def load(file: Path) -> Iterator[Bug]:
    """The bugs of a file of data."""
    for text in re.split(r"^(?=\w)", file.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        head, target, *lines = [one for one in text.splitlines() if one and one[0] != "#"]
        name, _, breaks = head.partition(": ")
        symbol, *tests = target.split()
        old, new = ("\n".join(one[4:] for one in lines if one[2] == sign) for sign in "-+")
        yield Bug(name, breaks, symbol, tuple(tests), old, new)


BUGS = tuple(bug for file in sorted((HERE / "bugs").glob("*.txt")) for bug in load(file))


def list_of(bugs: Sequence[Bug]) -> str:
    """The bugs with the tests that must notice them, for the page about them."""
    rows = ["| bug | in | breaks | tests |", "|---|---|---|---|"]
    for bug in bugs:
        tests = ", ".join(f"`{one.removeprefix('tests/')}`" for one in bug.tests)
        breaks = bug.breaks.replace("|", "\\|")
        rows.append(f"| {bug.name} | `{bug.symbol}` | {breaks} | {tests} |")
    return "\n".join(rows) + "\n"
