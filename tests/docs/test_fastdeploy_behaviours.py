"""The tests that a page names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_of_the_page_is_there():
    page = (ROOT / "docs" / "fastdeploy_behaviours.md").read_text(encoding="utf-8")
    found = 0
    for section in page.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        names = re.findall(r"`(test_\w+)`", body)
        if names:
            (file,) = re.findall(r"`([\w/]+\.py)`", heading)
            code = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert [name for name in names if f"def {name}(" not in code] == []
            found += len(names)
    assert found > 60
