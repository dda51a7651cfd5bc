"""The rules of the house that a machine can see."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvactors.actor import check_graph, edges
from kvactors.docsgen import ACTORS, render

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvactors"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FLOW = ["prefix_index", "gpu_swapper", "cpu_evictor", "storage", "flush_notifier"]
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


def test_nothing_imports_downstream_except_messages():
    wrong = []
    for file in SOURCES:
        room = file.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "kvactors."
            ):
                continue
            parts = node.module.split(".")
            if room == "actor" and parts[1] not in {"actor", "errors", "discreet"}:
                wrong.append((file.name, node.module))
            if (
                room in FLOW
                and parts[1] in FLOW
                and FLOW.index(parts[1]) > FLOW.index(room)
                and parts[-1] != "messages"
            ):
                wrong.append((file.name, node.module))
    assert wrong == []


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
