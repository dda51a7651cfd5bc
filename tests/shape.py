"""Shape of the package: `python -m tests.shape`.

Prints one row per package: modules, lines, lines of code, function lengths, and import cycles.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kvactors.scenario.output import print_rows, write_json
from tests.support.console import wide_console

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvactors"
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Module(NamedTuple):
    """A source file. name: dotted. package: its part of the package, `core` for top-level files."""

    name: str
    package: str
    text: str
    tree: ast.Module


def read_modules(package: Path = PACKAGE) -> list[Module]:
    """Every Python file of the package."""
    modules = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = file.read_text("utf-8")
        part = parts[1] if len(parts) > 2 else "core"
        modules.append(Module(dotted, part, text, ast.parse(text)))
    return modules


def is_text(node: Any) -> bool:
    """Whether a node is a string that stands alone: a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    prose: set[int] = set()
    node: Any
    for node in ast.walk(tree):
        if is_text(node):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def function_lines(tree: ast.Module) -> list[int]:
    """Lengths of functions and methods, without functions nested in them."""
    found: list[int] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((child.end_lineno or child.lineno) - child.lineno + 1)
            else:
                visit(child)

    visit(tree)
    return found


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


def percentile(values: list[int], share: float) -> int:
    """Nearest-rank percentile, 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def measure(modules: list[Module]) -> list[dict[str, Any]]:
    """One row per package, and one for all of them."""
    groups = sorted({module.package for module in modules})
    rows = []
    for name in [*groups, "all"]:
        chosen = [module for module in modules if name in ("all", module.package)]
        functions = [length for module in chosen for length in function_lines(module.tree)]
        rows.append(
            {
                "package": name,
                "modules": len(chosen),
                "lines": sum(len(module.text.splitlines()) for module in chosen),
                "code": sum(code_lines(module.text, module.tree) for module in chosen),
                "functions": [percentile(functions, share) for share in (0.5, 0.9, 1.0)],
            }
        )
    return rows


def print_shape(rows: list[dict[str, Any]], groups: list[list[str]], console: Console) -> None:
    """The table and the import cycles."""
    titles = ("package", "modules", "lines", "code", "function lines\np50 / p90 / max")
    cells = (
        (
            row["package"],
            f"{row['modules']}",
            f"{row['lines']:,}",
            f"{row['code']:,}",
            " / ".join(str(value) for value in row["functions"]),
        )
        for row in rows
    )
    print_rows("shape", titles, ((one, None) for one in cells), console, numbers=range(1, 5))
    for group in groups:
        console.print(f"import cycle: {', '.join(group)}")
    if not groups:
        console.print("no import cycles")


def main(arguments: list[str] | None = None) -> int:
    """Print the figures, or write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.shape", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    chosen = parser.parse_args(arguments)
    modules = read_modules()
    rows, groups = measure(modules), sorted(sorted(group) for group in cycles(imports()))
    print_shape(rows, groups, wide_console())
    if chosen.json is not None:
        report = {"packages": rows, "cycles": groups}
        write_json(report, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
