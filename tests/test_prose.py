"""The prose avoids the words listed in tests/prose.py, in every file that has none of them today.

The other files are in tests/prose_baseline.toml with their counts, which may only shrink.
"""

from __future__ import annotations

import pytest

from tests.prose import (
    RULES,
    Finding,
    baseline,
    counted,
    files,
    findings,
    markdown_prose,
    name_of,
    python_prose,
)

SHOWN = 15
"""Findings in the text of a failure, for each file."""


@pytest.fixture(scope="module")
def found() -> dict[str, list[Finding]]:
    return counted()


def test_the_files_are_found():
    names = {name_of(path) for path in files()}
    assert {"README.md", "kvactors/cache.py", "docs/architecture.md", "tests/conftest.py"} <= names


def test_no_file_has_more_words_to_avoid_than_before(found):
    allowed = baseline()
    worse = []
    for name, some in found.items():
        if len(some) > allowed.get(name, 0):
            worse.append(f"{name}: {len(some)} words to avoid, {allowed.get(name, 0)} before")
            worse += [str(one) for one in some[:SHOWN]]
    assert worse == [], "\n" + "\n".join(worse)


def test_the_baseline_is_lowered_with_each_improvement(found):
    better = {
        name: (count, len(found.get(name, ())))
        for name, count in baseline().items()
        if len(found.get(name, ())) < count
    }
    assert better == {}, "lower the baseline: python -m tests.prose --update"


SOURCE = '''"""One told."""

class Life:
    """Two told."""

    size: int = 1
    """Three told."""

def test_what_is_told():
    told = "not prose: told"  # four told
    log.info("five told", told=told)
    raise ValueError(f"six told {told} " "seven told")
'''


def told(names: bool) -> list[int]:
    return sorted(
        line for line, text in python_prose(SOURCE, names=names) for _ in range(text.count("told"))
    )


def test_python_prose_is_comments_docstrings_errors_events_and_names_of_tests():
    assert told(names=False) == [1, 4, 7, 10, 11, 12, 12]
    assert told(names=True) == [1, 4, 7, 9, 10, 11, 12, 12]


def test_markdown_prose_leaves_out_code_and_targets_of_links():
    page = "one [two](told.md)\n```\ntold\n```\nthree"
    assert list(markdown_prose(page)) == [(1, "one [two]"), (5, "three")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Nobody is told.", ["Nobody", "told"]),
        ("What it holds is kept: What else?", ["What"]),
        ("Ask what it holds. What does it hold?", []),
        ("It waits; then it goes", [";"]),
        ("NoRoom, wait_for_room, lifetime, deadline, `told`", []),
        ("ghost entries and a ghost", ["ghost"]),
        ("These blocks; These are kept", ["These"]),
        ("kept of these", ["these"]),
    ],
)
def test_words_are_found(text, words, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    monkeypatch.setattr("tests.prose.ROOT", tmp_path)
    assert [one.word for one in findings(page)] == words


def test_every_rule_names_a_better_word():
    assert all(rule.better for rule in RULES)
