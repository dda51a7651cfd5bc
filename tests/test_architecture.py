"""The rules of the house that a machine can see."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from kvactors.actor import check_graph, edges
from kvactors.docsgen import ACTORS, render

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvactors"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FLOW = ["prefix_index", "cpu_evictor", "gpu_swapper", "storage", "flush_notifier"]
CIRCLES = {
    frozenset({"cache", "from_thread", "lease"}),
}
"""Top-level parts that still import each other. This list may only get shorter."""

LOCKS = {
    "Lock",
    "RLock",
    "Semaphore",
    "BoundedSemaphore",
    "Condition",
    "Barrier",
    "Event",
    "CapacityLimiter",
}
BANNED = {("asyncio", "timeout"), ("asyncio", "wait_for")}


def test_there_are_sources():
    assert len(SOURCES) > 50


def test_no_locks_and_no_native_timeouts():
    found = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                pair = (node.value.id, node.attr)
                if (
                    pair[0] in {"threading", "asyncio", "anyio", "multiprocessing"}
                    and pair[1] in LOCKS
                ) or pair in BANNED:
                    found.append((file.name, pair))
            elif isinstance(node, ast.ImportFrom) and node.module in {
                "threading",
                "asyncio",
                "anyio",
                "multiprocessing",
            }:
                found += [(file.name, alias.name) for alias in node.names if alias.name in LOCKS]
    for file in (ROOT / "native").rglob("*.[ch]pp"):
        if re.search(
            r"std::(recursive_)?(mutex|condition_variable|shared_mutex|counting_semaphore)",
            file.read_text("utf-8"),
        ):
            found.append((file.name, "mutex"))
    assert found == []


def test_rooms_are_small():
    large = {
        f.name: n
        for f in [*SOURCES, *(ROOT / "native").glob("*.[ch]pp")]
        if (n := len(f.read_text("utf-8").splitlines())) > 560
    }
    assert large == {}


def imports() -> dict[tuple[str, str], list[str]]:
    """Where a top-level part (package or module) of kvactors imports another: (importer, imported)
    -> "file: module" of each import."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in SOURCES:
        part = file.relative_to(PACKAGE).with_suffix("").parts[0]
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
                    where = f"{file.relative_to(PACKAGE)}: {module}"
                    found.setdefault((part, other), []).append(where)
    return found


def test_actors_import_only_messages_and_only_downstream():
    wrong = []
    for (part, other), where in imports().items():
        if part == "actor" and other not in {"errors", "discreet"}:
            wrong += where
        if part in FLOW and other in FLOW:
            upstream = FLOW.index(other) < FLOW.index(part)
            wrong += [one for one in where if upstream or not one.endswith(".messages")]
    assert wrong == []


def circles(found: Iterable[tuple[str, str]]) -> set[frozenset[str]]:
    """The groups of parts each of which imports, perhaps through others, every other one."""
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


def test_no_parts_import_each_other_in_a_circle():
    found = circles(imports())
    assert found - CIRCLES == set(), "new circles of imports"
    assert CIRCLES - found == set(), "these circles are gone or smaller: correct CIRCLES"


def test_the_channel_graph_is_sound():
    assert set(check_graph(ACTORS)) == {actor.ROLE for actor in ACTORS}
    assert {(e.sender, e.receiver) for e in edges(ACTORS) if e.forward} >= {
        ("prefix_index", "cpu_evictor"),
        ("cpu_evictor", "gpu_swapper"),
    }


def test_messages_page_is_up_to_date():
    assert (ROOT / "docs" / "messages.md").read_text("utf-8") == render(), (
        "run: python -m kvactors.docsgen > docs/messages.md"
    )
