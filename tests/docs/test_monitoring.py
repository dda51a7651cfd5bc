"""The blocks of the how-to page about monitoring run as one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md"


def test_the_page_runs_as_one_program(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 3
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"requests": 1' in done.stdout
    assert '"status": "ok"' in done.stdout
    assert "lines of kvactors" in done.stdout
    assert 'health: {"status": "ok", "reasons": []}' in done.stdout
