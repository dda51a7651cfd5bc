"""The blocks of the how-to page about embedding are one program that runs."""

from __future__ import annotations

from tests.docs.pages import HOW_TO, blocks_of, output_of


def test_the_page_runs_as_one_program(tmp_path):
    blocks = blocks_of(HOW_TO / "embed_in_your_engine.md")
    assert len(blocks) == 8
    output = output_of("\n".join(blocks), tmp_path)
    assert "the first 96 tokens are committed" in output
    assert "cached: 96 of 103 tokens" in output
    assert "long: 0 tokens" not in output
