"""The programs of the README and of pages run as pasted, and print what the pages show."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from tests.docs.pages import DOCS, HOW_TO, blocks_of, output_of


@pytest.mark.parametrize(
    "page", ["first_cache.md", "how-to/sleep.md", "how-to/erase_a_tenant.md", "tier_cache.md"]
)
def test_the_parts_are_one_program_that_prints_what_the_page_shows(page, tmp_path):
    parts, shown = blocks_of(DOCS / page), blocks_of(DOCS / page, "text")
    assert parts
    output = output_of("\n".join(parts), tmp_path, {"TMPDIR": str(tmp_path), "PATH": ""})
    assert output == "".join(shown)


def test_the_program_about_forks_prints_the_block_counts(tmp_path):
    [program] = blocks_of(HOW_TO / "fork.md")
    found = output_of(program, tmp_path).strip()
    assert f"It prints `{found}`." in (HOW_TO / "fork.md").read_text("utf-8")


def test_the_page_about_monitoring_runs_as_one_program(tmp_path):
    output = output_of("\n".join(blocks_of(HOW_TO / "monitor.md")), tmp_path)
    for text in ('"requests": 1', '"status": "ok"', "lines of kvactors"):
        assert text in output
    assert 'health: {"status": "ok", "reasons": []}' in output


def test_the_readmes_example_runs_and_its_second_turn_hits_decoded_blocks(tmp_path):
    text = (DOCS.parent / "README.md").read_text("utf-8")
    example = text.split("## Embed it")[1].split("```python\n")[1].split("```")[0]
    output = output_of(example, tmp_path, {"TMPDIR": str(tmp_path), "PATH": ""})
    assert "cached: 0 of 200 tokens, then 320 of 321" in output
    assert list(tmp_path.iterdir()), "the store is in the temporary folder"


@pytest.mark.full
def test_two_nodes_share_a_folder_as_the_page_shows(tmp_path):
    page = DOCS / "two_nodes.md"
    [program], [shown] = blocks_of(page, 'python title="node.py"'), blocks_of(page, "text")
    (tmp_path / "node.py").write_text(program)
    output = ""
    for line in "".join(blocks_of(page, "sh")).splitlines()[1:]:
        command = [sys.executable if one == "python" else one for one in shlex.split(line)]
        output += subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
        ).stdout
    assert output == shown
