"""The README's example runs as pasted, in a plain installation."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import output_of

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_as_pasted_and_its_second_turn_hits_decoded_blocks(tmp_path):
    text = README.read_text("utf-8")
    example = text.split("## Embed it")[1].split("```python\n")[1].split("```")[0]
    output = output_of(example, tmp_path, {"TMPDIR": str(tmp_path), "PATH": ""})
    assert "cached: 0 of 200 tokens, then 320 of 321" in output
    assert list(tmp_path.iterdir()), "the store is in the temporary folder"
