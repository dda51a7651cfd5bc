"""Output of commands: tables, JSON files, and a live line of progress."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from itertools import compress
from os.path import realpath  # of a loop of links too
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvactors.errors import ConfigError

BAR = 20
"""Columns of the bar of progress."""

EDGES = 7
"""Columns of the edges and the padding of a table of names and values."""

NO_BREAK = "\xa0"

Cells = Sequence[str]


def check_output(_kind: Any, path: Path | None) -> None:
    """Check that a file can be written, before the work whose result it is to hold."""
    if path is None or to_stdout(path):
        return
    if str(path).startswith("--"):
        raise ValueError(f"{path} is an option: give a file, or - for standard output")
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"{path} is a folder")
    if not folder.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: permission denied")


Output = Annotated[Path, Parameter(validator=check_output, allow_leading_hyphen=True)]
"""A file that a command writes, `-` for standard output."""


def version() -> str:
    """The version of the installed package, "not installed" for a source tree on the path."""
    try:
        return metadata.version("kvactors")
    except metadata.PackageNotFoundError:
        return "not installed"


def to_stdout(path: Path | None) -> bool:
    """Whether an output is standard output, so that nothing else may be printed there."""
    return str(path) == "-"


def write_output(data: bytes, path: str | Path) -> None:
    """Write a file, or standard output if the path is `-`."""
    if str(path) == "-":
        sys.stdout.flush()
        binary = getattr(sys.stdout, "buffer", None)
        if binary is None:  # a program has put another stream in its place
            sys.stdout.write(data.decode())
        else:  # the text of a page is UTF-8 in every locale
            binary.write(data)
            binary.flush()
        return
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_json(data: Any, path: str | Path | None) -> None:
    """Write a report as JSON, to standard output if the path is `-`, nowhere if there is none."""
    if path is None:
        return
    try:
        text = msgspec.json.encode(data)
    except UnicodeEncodeError:  # the name of a file that is not UTF-8
        builtins = msgspec.to_builtins(data)
        text = in_unicode(json.dumps(builtins, ensure_ascii=False)).encode()
    write_output(msgspec.json.format(text, indent=2) + b"\n", path)


def in_unicode(name: str) -> str:
    """The name of a file, with a replacement for each byte that is not UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def need(module: str, what: str, extra: str) -> None:
    """Raise ConfigError, beginning with `what`, if a module of an extra is not installed."""
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what}: pip install '/path/to/kvactors[cli,{extra}]'") from error


def check_distinct(inputs: Iterable[Path | None], **outputs: Path | None) -> None:
    """Check that no output of a command is a file that it reads, or another output."""
    if sum(map(to_stdout, outputs.values())) > 1:
        raise ConfigError("only one output can be written to standard output")
    taken = {realpath(path): str(path) for path in inputs if path is not None}
    for option, path in outputs.items():
        if path is None or to_stdout(path):
            continue
        name = f"--{option.replace('_', '-')} {path}"
        if path.is_char_device():
            continue
        if (other := taken.get(realpath(path))) is not None:
            raise ConfigError(f"{name} would overwrite {other}: give another file")
        taken[realpath(path)] = name


def print_fields(title: str, fields: Iterable[tuple[str, str]], console: Console) -> None:
    """Print a table of names and values."""
    table = Table(title=escape(title), show_header=False)
    rows = list(fields)
    width = max(1, console.width - max((len(name) for name, _ in rows), default=0) - EDGES)
    for name, value in rows:
        lines = (
            textwrap.fill(unbroken(line), width, break_on_hyphens=False)
            for line in value.splitlines()
        )
        table.add_row(escape(name), escape("\n".join(lines).replace(NO_BREAK, " ")))
    console.print(table)


def unbroken(text: str) -> str:
    """Text whose lines break only where it has two spaces, if it has: not between the name of a
    number and the number."""
    return re.sub(r"(?<! ) (?! )", NO_BREAK, text) if "  " in text else text


def print_rows(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Cells],
    console: Console,
    *,
    numbers: range,
    styles: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Print a table of rows under headings, without columns that are empty in every row. styles: by
    the position of the row."""
    table, shown = Table(title=escape(title)), list(rows)
    filled = [any(cells[at] for cells in shown) or not shown for at in range(len(columns))]
    for position, heading in compress(enumerate(columns), filled):
        table.add_column(heading, justify="right" if position in numbers else "left")
    for position, cells in enumerate(shown):
        table.add_row(*map(escape, compress(cells, filled)), style=styles.get(position))
    console.print(table)


def print_details(text: str, console: Console) -> None:
    """Print a remark below a table."""
    console.print(text, style="dim", highlight=False, markup=False)


@contextmanager
def live_line(total: float | None = None) -> Iterator[Callable[..., object]]:
    """A line of progress on a terminal's standard error, and nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:  # a disabled Progress of older versions of rich ends with a line
        yield lambda *_: None
        return
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
    if total is not None:
        columns += [BarColumn(BAR), TaskProgressColumn(), TimeRemainingColumn(compact=True)]
    columns.append(TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        line = progress.add_task("starting", total=total)

        yield lambda text, done=0: progress.update(line, description=text, completed=done)
