"""Under `python -O`, which removes `assert`, the package still finds damage, and works."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = [
    file
    for file in sorted((ROOT / "kvactors").rglob("*.py"))
    if "testing" not in file.relative_to(ROOT).parts
]

DAMAGE = {
    "free_list": "cache.system.index_actor.index.pool.take(1)",
    "host_counts": "cache.system.evictor_actor.host.pinned += 1",
    "in_flight": "cache.system.in_flight.end(cache.system.in_flight.count + 1)",
}

PROGRAM = """
import asyncio
import kvactors

async def main():
    assert False, "this line is not there"
    config = kvactors.Config.from_mapping(
        {"device": {"num_blocks": 16}, "host": {"slots": 8}, "cache": {"block_size": 8}}
    )
    async with kvactors.open(config) as cache:
        async with await cache.acquire("a", list(range(40))) as lease:
            await lease.commit(40)
        await cache.wait_idle()
        sound = cache.check()
        try:
            DAMAGE
        except AssertionError as error:
            print(sound, "raised:", error)
        else:
            print(sound, "checked:", cache.check())
        import os
        os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_without_assert_statements(what):
    program = PROGRAM.replace("DAMAGE", DAMAGE[what])
    command = [sys.executable, "-O", "-c", program]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("[] "), done.stdout + done.stderr
    found = done.stdout.removeprefix("[] ").strip()
    assert found not in ("", "checked: []"), done.stderr


def test_the_product_asserts_only_for_type_checkers():
    """An assert that narrows a type (is not None, isinstance) protects no data: without it the next
    line raises."""
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in PRODUCT
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert len(PRODUCT) > 100
    assert wrong == []


def narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(narrows(value) for value in test.values)
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
