"""The program of the how-to page about sleep."""

from __future__ import annotations

from tests.docs.pages import HOW_TO, blocks_of, output_of


def test_the_page_runs_and_prints_its_output(tmp_path):
    [program] = blocks_of(HOW_TO / "sleep.md")
    assert blocks_of(HOW_TO / "sleep.md", "text") == [output_of(program, tmp_path)]
