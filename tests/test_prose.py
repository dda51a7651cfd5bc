"""The prose avoids the words listed in tests/prose.py."""

from __future__ import annotations

import pytest

from tests.prose import files, findings


def test_the_prose_avoids_some_words():
    found = [one for path in files() for one in findings(path)]
    assert found == [], "\n".join(["", *found])


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("page.md", "Nobody is told.\n```\ntold\n```\n`told` [told](told.md)", 3),
        ("module.py", '"""One told."""\ntold = "not prose: told"  # two told\n', 2),
        ("page.md", "ghost entries, life tables, lifetime", 0),
    ],
)
def test_words_are_found(name, text, count, tmp_path):
    page = tmp_path / name
    page.write_text(text, "utf-8")
    assert len(findings(page)) == count
