"""The blocks of the how-to page about embedding are one program that runs, and its batch loop is
right when clients leave at any moment."""

from __future__ import annotations

from tests.docs.pages import HOW_TO, blocks_of, output_of

PAGE = HOW_TO / "embed_in_your_engine.md"


def test_the_page_runs_as_one_program(tmp_path):
    blocks = blocks_of(PAGE)
    assert len(blocks) == 8
    output = output_of("\n".join(blocks), tmp_path)
    assert "the first 80 tokens are committed" in output
    assert " requests were preempted" in output
    assert "cached: 240 of 243 tokens" in output
    assert "long: 0 tokens" not in output
