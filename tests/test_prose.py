"""The prose avoids the words listed in tests/prose.py."""

from __future__ import annotations

from tests.prose import files, findings


def test_the_prose_avoids_some_words():
    found = [one for path in files() for one in findings(path)]
    assert found == [], "\n".join(["", *found])
