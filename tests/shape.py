"""Shape of the package: `python -m tests.shape`.

Prints one row per package: modules, lines, and import cycles.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from kvactors.scenario.output import print_rows, write_json

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvactors"


def imports(package: Path = PACKAGE) -> dict[tuple[str, str], list[str]]:
    """Imports between top-level parts (a part is a package or a module of `kvactors`).

    Returns:
        For each pair (importer, imported) the places, as "file: module".
    """
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted(package.rglob("*.py")):
        part = file.relative_to(package).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module == "kvactors":
                modules = [f"kvactors.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                top, _, rest = module.partition(".")
                other = rest.partition(".")[0]
                if top == "kvactors" and other and other != part:
                    where = f"{file.relative_to(package)}: {module}"
                    found.setdefault((part, other), []).append(where)
    return found


def cycles(found: Iterable[tuple[str, str]]) -> set[frozenset[str]]:
    """Groups of parts each of which imports every other one, directly or through others."""
    reached: dict[str, set[str]] = {}
    for part, other in found:
        reached.setdefault(part, set()).add(other)
    for via in list(reached):
        for others in reached.values():
            if via in others:
                others |= reached[via]
    return {
        frozenset(other for other in others if part in reached.get(other, ()))
        for part, others in reached.items()
        if part in others
    }


def measure() -> list[dict[str, Any]]:
    """One row per package, and one for all of them. `core`: the top-level files."""
    rows: dict[str, list[int]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        lines = len(file.read_text("utf-8").splitlines())
        for name in (parts[0] if len(parts) > 1 else "core", "all"):
            row = rows.setdefault(name, [0, 0])
            row[0], row[1] = row[0] + 1, row[1] + lines
    order = sorted(rows, key=lambda name: (name == "all", name))
    return [{"package": name, "modules": rows[name][0], "lines": rows[name][1]} for name in order]


def print_shape(rows: list[dict[str, Any]], groups: list[list[str]], console: Console) -> None:
    """The table and the import cycles."""
    cells = ((row["package"], f"{row['modules']}", f"{row['lines']:,}") for row in rows)
    titles = ("package", "modules", "lines")
    print_rows("shape", titles, cells, console, numbers=range(1, 3))
    for group in groups:
        console.print(f"import cycle: {', '.join(group)}")
    if not groups:
        console.print("no import cycles")


def main(arguments: list[str] | None = None) -> int:
    """Print the figures, or write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.shape", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    chosen = parser.parse_args(arguments)
    rows, groups = measure(), sorted(sorted(group) for group in cycles(imports()))
    console = Console()
    # In a file or a pipe the table is whole.
    print_shape(rows, groups, console if console.is_terminal else Console(width=160))
    if chosen.json is not None:
        report = {"packages": rows, "cycles": groups}
        write_json(report, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
