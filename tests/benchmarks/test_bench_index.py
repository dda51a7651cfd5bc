"""The benchmark of the index: the peer's turns, of a tree that a stand-in plays, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvactors import ConfigError
from tests.benchmarks import index
from tests.benchmarks.index_child import LENGTH, some_stored, stored_prompt

STAND_IN = """#!{python}
import json, sys
from tests.benchmarks.index import OurTree
tree = OurTree()
for line in sys.stdin:
    message = json.loads(line)
    with open({log!r}, "a") as log:
        log.write(line)
    do, answer = message.pop("do"), {{}}
    if do == "new":
        tree.new(message["block_size"], hashes=message["hashes"], blocks=0)
    elif do == "fill":
        tree.fill(message["prompts"])
        answer = {{"bytes": 1000 * message["prompts"]}}
    elif do == "visit":
        tree.visit()
    else:
        turn = getattr(tree, do)(*message.values())
        answer = {{"seconds": 1.0, "hits": turn.hits + {more}}}
    print(json.dumps(answer), flush=True)
"""
"""A program in the place of a Python that has SGLang: it plays our tree, a second a turn."""


def stand_in(folder: Path, more: int = 0) -> tuple[str, Path]:
    """The program, and the file of the lines that it is sent. more: hits that it makes up."""
    path, log = folder / "python", folder / "log"
    path.write_text(STAND_IN.format(python=sys.executable, log=str(log), more=more))
    path.chmod(0o755)
    return str(path), log


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in report["rows"]}


def test_the_peer_has_the_same_prompts_in_the_same_state(tmp_path: Path) -> None:
    python, log = stand_in(tmp_path)
    report = index.run(quick=True, sglang_python=python, blocks=1024)
    rows = rows_of(report)
    assert len(rows) == len(report["rows"]) == 16
    beside = [row for row in report["rows"] if row["limit_name"] in (index.PEER, index.HASHED)]
    assert len(beside) == 12
    assert rows["block 64, empty index"]["limit"] == pytest.approx(64 * LENGTH / 1e6, abs=1e-3)
    assert rows["block 16, 16,384-token prompts"]["limit"] == pytest.approx(8 * 16_384 / 1e6, 1e-3)
    memory = rows["block 64, memory a block of 64, 1,024 blocks"]
    assert (memory["limit"], memory["unit"]) == (round(1000 * 8 / 1024, 4), "bytes")
    asked = log.read_text()
    assert asked.count('"hashes": true') == 2
    assert asked.count('"do": "visit"') == 2
    assert asked.count('"do": "look_up"') == 2 * index.LOOK_UPS
    assert '"do": "fill", "prompts": 8}' in asked
    assert '"do": "fill", "prompts": 2}' in asked


def test_a_peer_that_finds_other_tokens_is_no_peer(tmp_path: Path) -> None:
    python, _ = stand_in(tmp_path, more=1)
    with pytest.raises(RuntimeError, match="not the same tokens were found"):
        index.run(quick=True, sglang_python=python)


def test_turns_count_what_was_there() -> None:
    ours = index.OurTree()
    ours.new(64, hashes=False, blocks=0)
    ours.fill(3)
    assert ours.look_up(0, 5).hits == 5 * LENGTH
    assert ours.insert(1, 16, 1024).hits == 14 * 768
    assert ours.insert(1, 16, 1024).hits == 16 * 1024
    assert all(
        any((prompt == stored_prompt(number)).all() for number in range(3))
        for prompt in some_stored(0, 5, 3)
    )


def test_a_number_of_blocks_below_zero_is_named() -> None:
    with pytest.raises(ConfigError, match="blocks is -1"):
        index.run(quick=True, blocks=-1)
