"""The parts of the first tutorial are one program, and print what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "first_cache.md"


def test_the_page_runs_and_prints_what_it_shows(tmp_path):
    text = PAGE.read_text("utf-8")
    parts = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(parts) == len(shown) == 4
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(parts)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"TMPDIR": str(tmp_path), "PATH": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(shown)
