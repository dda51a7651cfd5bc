"""The plugin that makes threads late (`tests.support.late`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMPT = """
import asyncio
import threading
import time


async def test_a_result_of_a_thread_arrives():
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    began = time.monotonic()
    threading.Thread(target=loop.call_soon_threadsafe, args=(arrived.set,)).start()
    await asyncio.wait_for(arrived.wait(), 60.0)
    print("LATE" if time.monotonic() - began > 0.0005 else "IN TIME")
"""


def test_threads_are_late_and_a_store_works_all_the_same(tmp_path):
    prompt = tmp_path / "test_prompt.py"
    prompt.write_text(PROMPT)
    file = ROOT / "tests/storage/test_file_slots.py"
    store = f"{file}::test_a_write_waits_for_a_slot_until_its_deadline"
    plugin = ["-p", "tests.support.late", "-p", "no:cacheprovider", "-n", "0", "-s", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-o", "asyncio_mode=auto", prompt, store],
        cwd=ROOT,
        env={**os.environ, "LATE_SHARE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LATE" in done.stdout
    assert "3 passed" in done.stdout
