"""The planted bugs still fit the code, and a few of them are really planted. `run.py` plants all of
them."""

from __future__ import annotations

import json
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
    assert all((run.ROOT / catcher.partition("::")[0]).exists() for catcher in mutation.catchers)


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
