"""Shields and threads of anyio do not hold against `task.cancel()`: the package has its own, in one
place."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "kvactors"
TOOLS = {"testing", "scenario", "top.py"}


def test_shields_and_thread_hand_offs_are_in_one_module():
    found = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if file.relative_to(PACKAGE).parts[0] not in TOOLS
        and re.search(
            r"shield=True\)|to_thread\.run_sync|asyncio\.to_thread|run_in_executor",
            file.read_text("utf-8"),
        )
    ]
    assert found == ["actor/uncancelled.py"]
