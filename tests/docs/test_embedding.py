"""The blocks of the how-to page about embedding are one program that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "embed_in_your_engine.md"


def test_the_page_runs_as_one_program(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    assert len(blocks) == 8
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the first 96 tokens are committed" in done.stdout
    assert "cached: 96 of 103 tokens" in done.stdout
    assert "long: 0 tokens" not in done.stdout
