"""Rules of the package's architecture that a test can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from kvactors.actor import check_graph, edges
from tests.docs.generators.messages import ACTORS
from tests.shape import cycles, imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvactors"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FLOW = ["prefix_index", "cpu_evictor", "gpu_swapper", "storage", "flush_notifier"]
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


TOOLS = {"testing", "scenario", "top.py"}


def test_shields_and_thread_hand_offs_are_in_one_module():
    """Shields and threads of anyio do not hold against `task.cancel()`."""
    found = [
        str(file.relative_to(PACKAGE))
        for file in SOURCES
        if file.relative_to(PACKAGE).parts[0] not in TOOLS
        and re.search(
            r"shield=True\)|to_thread\.run_sync|asyncio\.to_thread|run_in_executor",
            file.read_text("utf-8"),
        )
    ]
    assert found == ["actor/uncancelled.py"]


def test_actors_import_only_messages_and_only_downstream():
    wrong = []
    for (part, other), where in imports().items():
        if part == "actor" and other not in {"errors", "redact"}:
            wrong += where
        if part in FLOW and other in FLOW:
            upstream = FLOW.index(other) < FLOW.index(part)
            wrong += [one for one in where if upstream or not one.endswith(".messages")]
    assert wrong == []


COMMAND_LINE = {"__main__", "cli", "scenario", "settings_report", "top"}


def test_a_cache_imports_no_package_of_the_command_line():
    """Servers that embed a cache install it without the extra `cli`."""
    importing = [
        str(file.relative_to(PACKAGE))
        for file in SOURCES
        if file.relative_to(PACKAGE).with_suffix("").parts[0] not in COMMAND_LINE
        and re.search(r"(from|import) (cyclopts|rich|docstring_parser)\b", file.read_text("utf-8"))
    ]
    assert importing == ["settings/schema.py"]
    found = imports()
    assert [pair for pair in found if pair[1] in COMMAND_LINE and pair[0] not in COMMAND_LINE] == []
    schema = {(part, "settings.schema" in str(where)) for (part, _), where in found.items()}
    assert {part for part, imported in schema if imported} == {"settings_report"}


def test_no_parts_import_each_other_in_a_circle():
    assert cycles(imports()) == set()


def test_the_channel_graph_is_sound():
    assert set(check_graph(ACTORS)) == {actor.ROLE for actor in ACTORS}
    assert {(e.sender, e.receiver) for e in edges(ACTORS) if e.forward} >= {
        ("prefix_index", "cpu_evictor"),
        ("cpu_evictor", "gpu_swapper"),
    }


def test_architecture_page_names_every_package_and_every_module_beside_them():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    beside = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")} - {"scenarios/"}
    assert {name for name in beside | packages if f"`{name}`" not in page} == set()
    exist = {path.name for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.py")}
    assert set(re.findall(r"`(?:[\w.]+/)*(\w+\.py)`", page)) <= exist


def test_run_and_replay_import_only_fault_injectors_of_the_test_harness():
    script = (
        "import sys, kvactors.cli; "
        "print(*sorted(m for m in sys.modules if m.startswith('kvactors.testing')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["kvactors.testing", "kvactors.testing.faults"]


def test_a_class_name_belongs_to_one_class():
    """One name for one thing: a second class of a name is another part's, or wants another name."""
    names = Counter(
        node.name
        for file in SOURCES
        if file.parts[len(PACKAGE.parts)] != "scenarios"
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []
