"""The parts of the first tutorial are one program, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import blocks_of, output_of

PAGE = Path(__file__).parents[2] / "docs" / "first_cache.md"


def test_the_page_runs_and_prints_what_it_shows(tmp_path):
    parts, shown = blocks_of(PAGE), blocks_of(PAGE, "text")
    assert len(parts) == len(shown) == 4
    output = output_of("\n".join(parts), tmp_path, {"TMPDIR": str(tmp_path), "PATH": ""})
    assert output == "".join(shown)
