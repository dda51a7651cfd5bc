"""The example of the documentation runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_examples_run(tmp_path):
    page = (ROOT / "docs" / "tier_cache.md").read_text("utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) > 1
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(examples)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "kv-store").is_dir()
