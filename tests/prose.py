"""The words that the project's prose avoids, and where they still occur.

`python -m tests.prose PATH...` lists them in files or folders with a better word for each;
`python -m tests.prose --update` writes the counts of today to tests/prose_baseline.toml, unless
their sum would grow.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BASELINE = Path(__file__).parent / "prose_baseline.toml"
FOLDERS = ("kvactors", "tests", "docs", "scenarios", "native")
SUFFIXES = {".py", ".pyi", ".md", ".toml"}
SELF = {"tests/prose.py", "tests/test_prose.py", "tests/prose_baseline.toml"}


class Rule(NamedTuple):
    """A pattern to avoid, and what to write in its place."""

    pattern: re.Pattern[str]
    better: str


def words(pattern: str, better: str) -> Rule:
    """A rule for whole words, in upper or lower case."""
    return Rule(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), better)


RULES = (
    words("nobody|somebody|anybody", "the component: 'no sink', 'a rank', 'any actor'"),
    words("whoever|whichever|whatever|whom", "the component"),
    Rule(
        re.compile(r"(?:^[\s\"'#*|-]*|[.!:] )What\b(?![^.:;]*\?)"),
        "a noun as the subject: 'The blocks that ..'",
    ),
    words("told", "sent, reported, recorded, notified"),
    words("heard|hears|hearing", "received, receives"),
    words("say|says|said|saying", "state, report, specify"),
    words("speak|speaks|spoke|spoken|speaking", "send, address, communicate"),
    words("owe|owes|owed|owing", "pending, outstanding"),
    words("know|knows|knew|knowing", "has, tracks, holds"),
    words("believe|believes|believed", "'the sink's view'"),
    words("life|lives", "incarnation (of an actor), process, connection"),
    words("death|deaths", "failure"),
    words("dead|dies|died|dying", "failed, stopped"),
    words("revive|revives|revived|reviving", "restart"),
    words("bury|buries|buried", "fail, fail with the actor"),
    words("last words", "final report"),
    words("autopsy|autopsies", "check after a kill"),
    words("ghost|ghosts|zombie|zombies", "stale entry, leftover process"),
    words("house", "the package, the project"),
    words("room|rooms", "space, capacity, free blocks; a package or module"),
    words("door|doors", "the public API, the cache"),
    words("in words", "as text"),
    words("of its own|of their own|of our own", "'its own ..', separate"),
    words("under way", "in flight"),
    words("meanwhile", "in the meantime: name the event"),
    words("for ever|forever", "without end, until ..; give the bound"),
    words("as such", "name what it is"),
    words("the same of", "'the same N of ..'"),
    Rule(
        re.compile(
            r"\bthese\b(?=[.,;:)]|$| (?:are|were|is|may|must|can|have|need|go|come|do)\b)",
            re.IGNORECASE,
        ),
        "'these' with a noun",
    ),
    Rule(re.compile(r";(?= [a-z`*\[])"), "two sentences"),
)

ALLOWED = re.compile(
    r"ghost entr(?:y|ies)|ghost (?:list|queue|cache)s?|life tables?|free room",
    re.IGNORECASE,
)
"""Phrases of the field in which a listed word has its own meaning."""


class Finding(NamedTuple):
    """One word to avoid. path: relative to the repository."""

    path: str
    line: int
    word: str
    better: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}, better: {self.better}\n    {self.text}"


class Prose(NamedTuple):
    """A line of prose in a file."""

    line: int
    text: str


def files() -> list[Path]:
    """Every file that is checked."""
    found = [path for path in ROOT.iterdir() if path.suffix in SUFFIXES]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted(path for path in found if name_of(path) not in SELF and path.is_file())


def name_of(path: Path) -> str:
    """A file's path relative to the repository."""
    return path.resolve().relative_to(ROOT).as_posix()


def findings(path: Path) -> list[Finding]:
    """The words to avoid in one file."""
    name, found = name_of(path), []
    for line, text in prose(path):
        plain = ALLOWED.sub("", re.sub(r"`[^`]*`", "`", text))
        for rule in RULES:
            for match in rule.pattern.finditer(plain):
                word = match[0].strip(" \"'#*|-.!:")
                found.append(Finding(name, line, word, rule.better, text.strip()))
    return sorted(found, key=lambda one: one.line)


def prose(path: Path) -> Iterator[Prose]:
    """The prose of a file, line by line."""
    text = path.read_text("utf-8")
    if path.suffix in {".py", ".pyi"}:
        yield from python_prose(text, names=path.name.startswith("test_"))
    elif path.suffix == ".md":
        yield from markdown_prose(text)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if comment := re.search(r"(?:^|\s)#(.*)$", line):
                yield Prose(number, comment[1].strip())


def markdown_prose(text: str) -> Iterator[Prose]:
    """Everything but fenced code and the targets of links."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced:
            yield Prose(number, re.sub(r"\]\([^)]*\)", "]", line))


def python_prose(text: str, *, names: bool) -> Iterator[Prose]:
    """Comments, docstrings, texts of errors and log events, and with `names` names of tests."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Prose(token.start[0], token.string.lstrip("#: "))
    lines = text.encode().splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and is_text(node.value):
            yield from literal(node.value, lines)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from texts(node.exc.args, lines)
        elif isinstance(node, ast.Call) and is_log(node.func):
            yield from texts(node.args[:1], lines)
        elif (
            names
            and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
        ):
            yield Prose(node.lineno, node.name.replace("_", " "))


def is_text(node: ast.AST) -> bool:
    """Whether a node is a string literal, an f-string included."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_log(function: ast.AST) -> bool:
    """Whether a function that is called is a method of a logger."""
    return (
        isinstance(function, ast.Attribute)
        and function.attr in {"debug", "info", "warning", "error", "exception", "critical"}
        and ast.unparse(function.value).rpartition(".")[2] in {"log", "logger", "_log"}
    )


def texts(nodes: Iterable[ast.expr], lines: list[bytes]) -> Iterator[Prose]:
    """The string literals in expressions."""
    for outer in nodes:
        inner = [node for node in ast.walk(outer) if is_text(node)]
        parts = {id(part) for node in inner for part in ast.walk(node) if part is not node}
        for node in inner:
            if id(node) not in parts:
                yield from literal(node, lines)


def literal(node: ast.AST, lines: list[bytes]) -> Iterator[Prose]:
    """The lines of a string literal as they stand in the file."""
    assert isinstance(node, ast.expr)
    first, last = node.lineno, node.end_lineno or node.lineno
    for number in range(first, last + 1):
        line = lines[number - 1]
        start = node.col_offset if number == first else 0
        part = line[start : node.end_col_offset if number == last else None].decode()
        bare = re.sub(r"\{[^{}]*\}", "{}", part)  # the expressions of an f-string
        yield Prose(number, bare.strip().strip("\"'"))


def counted() -> dict[str, list[Finding]]:
    """The findings of every file that has any."""
    found = {name_of(path): findings(path) for path in files()}
    return {name: some for name, some in found.items() if some}


def baseline() -> dict[str, int]:
    """The count of each file that may still have such words."""
    return dict(tomllib.loads(BASELINE.read_text("utf-8"))["counts"])


def write_baseline(counts: dict[str, int]) -> None:
    """Replace the baseline."""
    lines = [f'"{name}" = {count}' for name, count in sorted(counts.items())]
    BASELINE.write_text(
        "# Words to avoid (tests/prose.py) that each file still has. Only ever lower these:\n"
        "# `python -m tests.prose --update` writes the counts of today.\n\n[counts]\n"
        + "".join(f"{line}\n" for line in lines),
        "utf-8",
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.prose", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders")
    parser.add_argument("--update", action="store_true", help="lower the baseline")
    options = parser.parse_args()
    if options.update:
        counts = {name: len(some) for name, some in counted().items()}
        before, after = sum(baseline().values()), sum(counts.values())
        if after > before:
            print(f"{after} words to avoid, {before} in the baseline: it may not grow")
            return 1
        write_baseline(counts)
        print(f"{before} -> {after}")
        return 0
    inside = [path.resolve() for path in options.paths] or [ROOT]
    chosen = [path for path in files() if any(path == top or top in path.parents for top in inside)]
    found = [one for path in chosen for one in findings(path)]
    total = sum(len(line.text.split()) for path in chosen for line in prose(path))
    for one in found:
        print(one)
    print(f"{len(found)} in {total} words: {1000 * len(found) / max(1, total):.1f} per 1,000")
    return 0


if __name__ == "__main__":
    sys.exit(main())
