"""Pages of reports in Debian's Chromium, without a window and without a network."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from kvactors.cli import main

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[2]
BROWSER = (
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=5000",
)
WHITE = 8_000
"""Bytes of a picture of this size that shows nothing, at most."""


def show(page: Path, tmp_path: Path) -> tuple[str, list[str], int]:
    """The document after loading, the lines of the console, and the bytes of a picture of it."""
    home = f"--user-data-dir={tmp_path / 'profile'}"
    run = subprocess.run(
        [*BROWSER, home, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    picture = tmp_path / "page.png"
    subprocess.run(
        [*BROWSER, home, f"--screenshot={picture}", "--window-size=1400,2400", page.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    console = re.findall(r".*:CONSOLE.*", run.stderr)
    return run.stdout, console, picture.stat().st_size


def call(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert ended.value.code == 0


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    requests = [list(range(i % 7)) + [100 * i + j for j in range(5)] for i in range(60)]
    path.write_text(
        "".join(
            json.dumps({"timestamp": 10 * i, "output_length": 3, "hash_ids": ids}) + "\n"
            for i, ids in enumerate(requests)
        )
    )
    return path


def test_a_run_a_replay_and_a_sweep(tmp_path, trace):
    pages = {kind: tmp_path / f"{kind}.html" for kind in ("run", "replay", "sweep")}
    call("run", ROOT / "scenarios" / "sink_outage.toml", "--virtual", "--html", pages["run"])
    call("replay", trace, "--html", pages["replay"])
    call("sweep", trace, "--html", pages["sweep"])
    for kind, page in pages.items():
        document, console, picture = show(page, tmp_path)
        assert console == []
        assert document.count("<svg") >= (1 if kind == "sweep" else 10)
        assert "NaN" not in document
        assert picture > 5 * WHITE
