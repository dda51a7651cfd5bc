"""The worker processes of many seeds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANG = 40.0
"""Bounds a hang only."""


def children_of(pid: int) -> list[int]:
    """Worker processes of a simulation."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if int(status[1]) == pid and b"spawn_main" in command:
                found.append(int(folder.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_end_with_their_parent(kind):
    command = [sys.executable, "-m", "tests.simulation", "--minutes", "5"]
    parent = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + HANG
        while len(workers := children_of(parent.pid)) < 2:
            assert time.monotonic() < until, "no workers were started"
            assert parent.poll() is None
            time.sleep(0.05)
        parent.send_signal(kind)
        parent.wait(HANG)
        while any(alive(worker) for worker in workers):
            assert time.monotonic() < until + HANG, "a worker runs on without its parent"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
        for worker in workers:
            if alive(worker):
                os.kill(worker, signal.SIGKILL)
