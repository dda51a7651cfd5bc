"""The planted bugs still fit the code, and a few of them are really planted. `run.py` plants all of
them."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import docs_hook
import pytest
import run
from catalogue import MUTATIONS
from mutation import Mutation
from rich.console import Console

FEW = ("start_block_off_by_one", "salt_not_in_the_key", "cancelled_get_loses")
HARMLESS_FOR = (
    "tests/prefix_index/test_identity.py::test_no_text_moves_from_one_field_of_a_root_into_another"
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_occurs_once_and_changes_the_code(mutation):
    run.planted(mutation, run.source_of(mutation))
    assert mutation.catchers
    assert [catcher for catcher in mutation.catchers if not is_defined(catcher)] == []


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
    assert not is_defined(f"{here}::Mutation")  # imported there
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
        for mutation in MUTATIONS
        for catcher in mutation.catchers
        if "[" in catcher and catcher.partition("::")[0] in files
    }
    assert sorted(cases - ids) == []


def test_names_are_given_once():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 18


def test_the_page_gets_every_bug_when_the_site_is_built(capsys):
    docs = run.ROOT / "docs"
    page = SimpleNamespace(file=SimpleNamespace(src_uri=docs_hook.PAGE))
    text = (docs / docs_hook.PAGE).read_text("utf-8")
    built = docs_hook.on_page_markdown(text, page, config=None, files=None)
    rows = [line.split(" | ") for line in built.splitlines() if line.startswith("| ")]
    assert [row[0][2:] for row in rows[1:]] == [mutation.name for mutation in MUTATIONS]
    assert all(len(row) == 4 for row in rows)
    hooks = (run.ROOT / "mkdocs.yml").read_text("utf-8")
    assert f"hooks:\n  - tests/planted/{docs_hook.__name__}.py\n" in hooks
    assert run.main(["--list", "--only", MUTATIONS[0].name]) == 0
    assert capsys.readouterr().out == run.list_of(MUTATIONS[:1])
    other = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert docs_hook.on_page_markdown(text, other) == text


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("b = 3\n", "b = 4\n", "occurs 0 times"),
        ("a", "b", "occurs 2 times"),
        ("a = 1\n", "a = 1  # one\n", "changes nothing"),
        ("a = 1\n", "a = (\n", "is no Python"),
    ],
)
def test_a_mutation_that_does_not_apply_is_stale(old, new, why):
    mutation = Mutation("one", "types.py", old, new, "nothing", ("tests",))
    with pytest.raises(run.Stale, match=why):
        run.planted(mutation, "a = 1\nc = a\n")


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


def test_some_are_planted_and_caught(tmp_path, capsys):
    only = [argument for name in FEW for argument in ("--only", name)]
    assert (
        run.main(
            [*only, "--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
        )
        == 0
    )
    assert "3 of 3 caught" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert result["broken"] == []
    assert [one["caught"] for one in result["mutations"]] == [True] * 3
    assert (tmp_path / "out.md").read_text("utf-8").count("\n") == 5


def test_a_mutation_that_no_test_notices_is_not_caught():
    harmless = Mutation(
        "another_budget",
        "actor/mailbox_loop.py",
        "TURN_BUDGET = 64\n",
        "TURN_BUDGET = 63\n",
        "nothing",
        (HARMLESS_FOR,),
    )
    broken, verdicts = run.try_all([harmless], 1, Console(quiet=True))
    assert broken == []
    assert [(verdict.caught, verdict.how) for verdict in verdicts] == [(False, "passes")]
