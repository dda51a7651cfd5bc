"""The planted bugs still fit the code, and a few of them are really planted. `run.py` plants all of
them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import catalogue
import docs_hook
import pytest
import run
from catalogue import BUGS, Bug, Stale, planted
from rich.console import Console

FEW = ("start_block_off_by_one", "salt_not_in_the_key", "cancelled_get_loses")
HARMLESS_FOR = (
    "tests/prefix_index/test_identity.py::test_no_text_moves_from_one_field_of_a_root_into_another"
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_occurs_once_and_changes_the_code(bug):
    planted(bug)
    assert bug.tests
    assert [test for test in bug.tests if not is_defined(test)] == []


@cache
def defined(file: Path) -> frozenset[str]:
    """The functions, classes and methods of a test file, as node ids without the file. One that
    ends with `::` is a class whose members may be inherited."""
    names = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name, *([f"{node.name}::"] if node.bases else [])}
            names |= {f"{node.name}::{one.name}" for one in node.body if hasattr(one, "name")}
        elif isinstance(node, ast.Assign):  # the TestCase of a Hypothesis machine
            found = [one.id for one in node.targets if isinstance(one, ast.Name)]
            names |= {*found, *(f"{one}::" for one in found)}
        elif hasattr(node, "name"):
            names.add(node.name)
    return frozenset(names)


def is_defined(catcher: str) -> bool:
    """Whether the file of a catcher is there, and its test in it."""
    name, _, test = catcher.partition("::")
    file, test = run.ROOT / name, test.partition("[")[0]
    if not test or not file.exists():
        return file.exists()
    owner, colons, _ = test.partition("::")
    return bool({test, owner + colons} & defined(file)) if colons else test in defined(file)


def test_a_catcher_that_is_gone_is_found():
    here = "tests/planted/test_planted.py"
    assert is_defined(f"{here}::test_names_are_given_once[of a case]")
    assert is_defined(here)
    assert not is_defined(f"{here}::test_names_were_given_once")
    assert not is_defined(f"{here}::Bug")  # imported there
    assert not is_defined("tests/planted/test_gone.py")
    assert is_defined("tests/cli/test_terminable.py::TestRunTerminable")
    assert not is_defined("tests/cli/test_terminable.py::TestRunTerminable::test_gone")


def test_the_cases_of_catchers_exist(request):
    """Only where all tests are collected: the ids of cases are not in the source."""
    option = request.config.getoption
    ids = {item.nodeid for item in request.session.items}
    if option("-k") or option("-m") or any("::" in one for one in request.config.args):
        pytest.skip("only some tests are collected")
    files = {one.partition("::")[0] for one in ids}
    cases = {
        catcher
        for bug in BUGS
        for catcher in bug.tests
        if "[" in catcher and catcher.partition("::")[0] in files
    }
    assert sorted(cases - ids) == []


def test_names_are_given_once():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 18


def test_the_page_gets_every_bug_when_the_site_is_built(capsys):
    docs = run.ROOT / "docs"
    page = SimpleNamespace(file=SimpleNamespace(src_uri=docs_hook.PAGE))
    text = (docs / docs_hook.PAGE).read_text("utf-8")
    built = docs_hook.on_page_markdown(text, page, config=None, files=None)
    rows = [line.split(" | ") for line in built.splitlines() if line.startswith("| ")]
    assert [row[0][2:] for row in rows[1:]] == [bug.name for bug in BUGS]
    assert all(len(row) == 4 for row in rows)
    hooks = (run.ROOT / "mkdocs.yml").read_text("utf-8")
    assert f"hooks:\n  - tests/planted/{docs_hook.__name__}.py\n" in hooks
    assert run.main(["--list", "--only", BUGS[0].name]) == 0
    assert capsys.readouterr().out == run.list_of(BUGS[:1])
    other = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert docs_hook.on_page_markdown(text, other) == text


SOURCE = """
LIMIT = 4

class Store:
    @property
    def free(self):
        return self.size - (
            self.used  # blocks
            + self.held
        )

    def take(self, count):
        if count > LIMIT:
            raise ValueError(count)
        self.used += count
        self.note(count, at=self.now(),)
        return self.used

def take(count):
    return count
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package of two modules, whose symbols are searched."""
    for name, text in {"a/store": SOURCE, "b": "class Store:\n    LIMIT = 4\n"}.items():
        file = tmp_path / f"kvactors/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    catalogue.places.cache_clear()
    yield tmp_path
    catalogue.places.cache_clear()


def changed(symbol, old, new):
    """The lines that a bug brings."""
    file, text = planted(Bug("one", "nothing", symbol, ("tests",), old, new))
    before = file.read_text("utf-8").splitlines()
    return [one for one in text.splitlines() if one not in before and one.strip()]


@pytest.mark.parametrize(
    ("symbol", "old", "new", "lines"),
    [
        ("LIMIT", "4", "5", ["LIMIT = 5"]),
        ("Store.free", "return self.size - (self.used + self.held)", "pass", ["        pass"]),
        ("Store.free", "self.used + self.held", "self.used", ["            self.used"]),
        ("Store.take", "note(count, at=self.now())", "note()", ["        self.note()"]),
        ("Store.take", "if count > LIMIT:\n    raise ValueError(count)", "", []),
        (
            "store.Store.take",
            "    raise ValueError(count)\nself.used += count",
            "    pass\nif count:\n    return",
            ["            pass", "        if count:", "            return"],
        ),
        ("kvactors/a/store.py", "LIMIT = 4", "LIMIT = 5", ["LIMIT = 5"]),
    ],
)
def test_a_bug_is_planted_in_its_symbol(tree, symbol, old, new, lines):
    assert changed(symbol, old, new) == lines


@pytest.mark.parametrize(
    ("symbol", "old", "new", "why"),
    [
        ("Store.take", "self.gone()", "pass", "occurs 0 times in Store.take"),
        ("Store.gone", "return", "pass", "occurs 0 times in Store.gone"),
        ("take", "count", "1", "occurs 2 times in take"),
        ("free", "return", "pass", "occurs 0 times in free"),
        ("Store.take", "count", "1", "occurs 5 times"),
        ("Store.take", "return self.used", "return (self.used)  # one", "changes nothing"),
        ("Store.take", "return self.used", "return (", "is no Python"),
    ],
)
def test_a_bug_that_does_not_apply_is_stale(tree, symbol, old, new, why):
    with pytest.raises(Stale, match=why):
        changed(symbol, old, new)


FAILED = "FAILED tests/a/test_b.py::test_c[x - y] - assert 1 == 2\n"
HANGS = "FAILED tests/a/test_b.py::test_c - Failed: Timeout (>25.0s) from pytest-timeout.\n"


@pytest.mark.parametrize(
    ("code", "output", "caught", "how"),
    [
        (1, FAILED, True, "fails"),
        (1, HANGS, True, "hang"),
        (None, "", True, "hang"),
        (0, "", False, "passes"),
        (1, "", False, "pytest ended with 1"),
        (2, "ERROR tests/a/test_b.py\n", False, "pytest ended with 2"),
        (4, "", False, "pytest ended with 4"),
        (5, "", False, "pytest ended with 5"),
    ],
)
def test_only_a_test_that_fails_or_hangs_has_caught_anything(code, output, caught, how):
    verdict = run.verdict_of(code, output, 1.0)
    assert (verdict.caught, verdict.how) == (caught, how)


@pytest.mark.ci
def test_some_are_planted_and_caught(capsys):
    assert run.main([argument for name in FEW for argument in ("--only", name)]) == 0
    assert "3 of 3 caught; the unmutated copy passes" in capsys.readouterr().out


def test_a_bug_that_no_test_notices_is_not_caught():
    harmless = Bug("another_budget", "nothing", "TURN_BUDGET", (HARMLESS_FOR,), "64", "63")
    broken, verdicts = run.try_all([harmless], 1, Console(quiet=True))
    assert broken == []
    assert [(verdict.caught, verdict.how) for verdict in verdicts] == [(False, "passes")]
