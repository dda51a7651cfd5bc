"""The blocks of the how-to page about monitoring run as one program."""

from __future__ import annotations

from tests.docs.pages import HOW_TO, blocks_of, output_of


def test_the_page_runs_as_one_program(tmp_path):
    blocks = blocks_of(HOW_TO / "monitor.md")
    assert len(blocks) >= 3
    output = output_of("\n".join(blocks), tmp_path)
    assert '"requests": 1' in output
    assert '"status": "ok"' in output
    assert "lines of kvactors" in output
    assert "8.0 slots" in output
    assert 'health: {"status": "ok", "reasons": []}' in output
