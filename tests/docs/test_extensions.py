"""The how-to pages about extensions are carried out: the classes pass the suites on the pages, and
a cache opens with the settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"```(?:python|toml) title=\"([^\"]+)\"\n(.*?)```", re.DOTALL)

SERVE = """
import asyncio
import kvactors

async def main():
    async with kvactors.open(kvactors.Config.from_toml("cache.toml")) as cache:
        size = cache.block_size
        for request in range(3):
            lease = await cache.acquire("r", range(1000 * request, 1000 * request + 4 * size))
            await lease.wait_ready()
            await lease.finish(lease.num_tokens)
        await cache.wait_flushed()
        assert cache.check() == []

asyncio.run(main())
"""


@pytest.mark.parametrize("page", ["write_a_sink", "write_a_back_end", "write_a_layout"])
def test_the_page_is_carried_out(tmp_path, page):
    files = dict(BLOCK.findall((HOW_TO / f"{page}.md").read_text("utf-8")))
    assert "cache.toml" in files
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    (suite,) = (name for name in files if name.startswith("test_"))
    (tmp_path / "serve.py").write_text(SERVE, "utf-8")
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *OPTIONS, suite)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    done = run(tmp_path, "serve.py")
    assert done.returncode == 0, done.stdout + done.stderr


OPTIONS = ("-p", "no:hypothesispytest")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with the package of this tree."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
