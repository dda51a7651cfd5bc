"""The page about a trace of your traffic: its commands run, and its figures are theirs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.docs.pages import HOW_TO, blocks_of

PAGE = HOW_TO / "is_it_worth_it.md"


@pytest.mark.ci
def test_the_commands_run_and_the_figures_are_theirs(tmp_path):
    for text in blocks_of(PAGE, "toml"):
        (tmp_path / re.findall(r"^# (\S+\.toml)", text)[0]).write_text(text)
    commands = [
        shlex.split(line)
        for block in blocks_of(PAGE, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if "tcp://" not in line  # needs an engine
    ]
    assert [words[:2] for words in commands] == [
        ["kvactors", "sweep"],
        *[["kvactors", "replay"]] * 2,
    ]
    for _, *words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "kvactors", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
    page = PAGE.read_text("utf-8")
    for point in json.loads((tmp_path / "sweep.json").read_text())["points"]:
        rates = (point["hit_rate"], point["retain"], point["optimum"])
        assert f"| {point['blocks']:,} | {' | '.join(f'{rate:.2f}' for rate in rates)} |" in page
    for name, row in (("today", "| device alone |"), ("tiers", "| device and host |")):
        report = json.loads((tmp_path / f"{name}.json").read_text())
        [shown] = [line.split("|")[2] for line in page.splitlines() if line.startswith(row)]
        assert report["hit_rate"]["total"] == pytest.approx(float(shown), abs=0.03)
        assert set(report["serving"]) == {"cache", "none", "lru"}
