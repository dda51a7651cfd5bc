"""Pages whose Python blocks are one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
HOW_TO = DOCS / "how-to"


def blocks_of(page: Path, language: str = "python") -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)


def output_of(program: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a program in a folder, and return its output. No error, and no warning but that health
    has changed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("cache health ")]
    assert (done.returncode, said) == (0, [])
    return done.stdout
