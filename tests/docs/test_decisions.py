"""The pages of docs/decisions are numbered without gaps, and the navigation lists all of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def test_decisions_are_numbered_without_gaps():
    assert [page.name[:4] for page in PAGES] == [f"{n:04d}" for n in range(1, len(PAGES) + 1)]
    for page in PAGES:
        assert page.read_text("utf-8").startswith(f"# {page.name[:4]} "), page.name


def test_the_navigation_lists_every_decision():
    listed = re.findall(r"decisions/(\d{4}-[\w-]+\.md)", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert listed == [page.name for page in PAGES]
