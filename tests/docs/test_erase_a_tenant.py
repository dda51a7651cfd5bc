"""The program of the how-to page about erasing a tenant."""

from __future__ import annotations

from tests.docs.pages import HOW_TO, blocks_of, output_of


def test_the_page_runs_and_prints_its_output(tmp_path):
    [program] = blocks_of(HOW_TO / "erase_a_tenant.md")
    assert blocks_of(HOW_TO / "erase_a_tenant.md", "text") == [output_of(program, tmp_path)]
