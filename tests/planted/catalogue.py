"""Every planted bug: `BUGS` of each file `bugs_*.py` beside this one. A new area gets a file of its
own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mutation import Mutation

FILES = sorted(file.stem for file in Path(__file__).parent.glob("bugs_*.py"))

MUTATIONS: tuple[Mutation, ...] = tuple(bug for name in FILES for bug in import_module(name).BUGS)


def list_of(mutations: Sequence[Mutation]) -> str:
    """The bugs with the tests that must notice them, for the page about them."""
    rows = ["| bug | in | breaks | tests |", "|---|---|---|---|"]
    for mutation in mutations:
        tests = ", ".join(f"`{one.removeprefix('tests/')}`" for one in mutation.catchers)
        breaks = mutation.breaks.replace("|", "\\|")
        rows.append(f"| {mutation.name} | `{mutation.file}` | {breaks} | {tests} |")
    return "\n".join(rows) + "\n"
