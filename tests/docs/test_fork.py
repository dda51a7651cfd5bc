"""The program of the how-to page about forks."""

from __future__ import annotations

from tests.docs.pages import HOW_TO, blocks_of, output_of


def test_the_page_runs_and_prints_the_block_counts(tmp_path):
    [program] = blocks_of(HOW_TO / "fork.md")
    found = output_of(program, tmp_path).strip()
    assert f"It prints `{found}`." in (HOW_TO / "fork.md").read_text("utf-8")
