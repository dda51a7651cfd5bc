"""Benchmarks beside peers that stand-ins play, and the errors of peers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvactors import ConfigError
from tests.benchmarks import decode, engine, frame, index, service, store
from tests.benchmarks.frame import Report, Row
from tests.benchmarks.index_child import LENGTH

MakePython = Callable[[str], str]


@pytest.fixture
def python(tmp_path: Path) -> MakePython:
    """A program in the place of a Python that has a peer. Its class `Answers` answers the lines.
    It writes the lines to `log`."""

    def make(source: str) -> str:
        path = tmp_path / "python"
        path.write_text(
            f"#!{sys.executable}\nimport sys\nfrom tests.benchmarks.lines import answer_lines\n"
            f"log = open({str(tmp_path / 'log')!r}, 'a', buffering=1)\n{source}\n"
            "answer_lines(Answers)\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


def by_case(report: Report) -> dict[tuple[str, str], Row]:
    found = {(row.case, row.limit_name): row for row in report.rows}
    assert len(found) == len(report.rows)
    return found


OUR_TREE = """
from tests.benchmarks.index import OurTree
class Answers(OurTree):
    def new(self, block_size, hashes):
        super().new(block_size, hashes=hashes, blocks=0)
    def fill(self, prompts):
        super().fill(prompts)
        return {"bytes": 1000 * prompts}
    def insert(self, **sizes):
        return {"seconds": 1.0, "hits": super().insert(**sizes).hits + MORE}
    def look_up(self, **sizes):
        return {"seconds": 1.0, "hits": super().look_up(**sizes).hits + MORE}
"""


def test_sglangs_tree_has_the_same_prompts_in_the_same_state(python: MakePython) -> None:
    report = index.run(quick=True, sglang_python=python(OUR_TREE.replace("MORE", "0")))
    rows = by_case(report)
    assert len([one for one in rows if one[1] in (index.PEER, index.HASHED)]) == 12
    empty = rows["block 64, empty index", index.PEER]
    assert empty.limit == pytest.approx(64 * LENGTH / 1e6, abs=1e-3)
    memory = rows["block 64, memory a block of 64, 1,024 blocks", index.PEER]
    assert (memory.limit, memory.unit) == (round(1000 * 8 / 1024, 4), "bytes")


def test_a_tree_that_finds_other_tokens_is_no_peer(python: MakePython) -> None:
    with pytest.raises(RuntimeError, match="not the same tokens were found"):
        index.run(quick=True, sglang_python=python(OUR_TREE.replace("MORE", "1")))


def test_a_decode_step_is_beside_the_bar_and_each_peer(
    python: MakePython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "SIZES", ((8, 16),))
    monkeypatch.setattr(decode, "BARS_US", {8: 1.0})
    two_us = python(
        "class Answers:\n    def round(self, requests, block):\n"
        f"        return {{'seconds': requests * {decode.STEPS} * 2e-6}}"
    )
    rows = by_case(decode.run(quick=True, vllm_python=two_us, sglang_python=two_us))
    limits = {name: rows["8 requests, block 16, step", name].limit for name in ("the bar",)}
    limits |= {
        name: rows["8 requests, block 16, step", name].limit for name in decode.PEERS.values()
    }
    assert limits == {"the bar": 1.0, **dict.fromkeys(decode.PEERS.values(), 2.0)}


def test_vllms_fs_tier_takes_its_turn_in_every_round(
    python: MakePython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "pool_rows", lambda **_: [])
    source = """
class Answers:
    def open(self, **fields): print("open", fields["slots"], fields["size"], file=log)
    def move(self, what, **fields):
        print(what, fields["count"], fields["batch"], file=log)
        return {"seconds": 2.0, "processor": 1.0, "failed": FAILED}
    def close(self): print("close", file=log)
"""
    rows = by_case(store.run(quick=True, vllm_python=python(source.replace("FAILED", "0"))))
    load = store.load_of(64 << 10, 2 << 20)
    for what in ("write", "read"):
        beside = rows[f"64 KiB, {what}, beside vLLM", store.VLLM]
        assert beside.limit == pytest.approx(1.0486, rel=1e-3)
        assert rows[f"64 KiB, {what}, processor time", store.VLLM].limit == pytest.approx(
            1e9 / (2 << 20), rel=1e-3
        )
    moved = [f"{what} {load.objects} {load.batch}" for what in ("write", "read")]
    assert (tmp_path / "log").read_text().splitlines() == ["open 32 65536", *moved, "close"]
    with pytest.raises(RuntimeError, match="3 jobs of vLLM's fs tier failed"):
        store.run(quick=True, vllm_python=python(source.replace("FAILED", "3")))


@pytest.mark.ci
def test_whole_prompts_come_back_and_are_stored_and_a_peer_does_the_same_work(
    python: MakePython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    twelve = python("""
class Answers:
    def open(self, **fields): print("open", fields["slots"], file=log)
    def move(self, what, **fields):
        print(what, fields.get("at_once", ""), file=log)
        return {"blocks": 12, "seconds": 2.0}
    def close(self): print("close", file=log)
""")
    report = service.run(quick=True, vllm_python=twelve)
    rows = {row.case: row for row in report.rows}
    shares = {case: row.ours for case, row in rows.items() if case.endswith("share")}
    assert len(shares) == 1 + 5
    assert set(shares.values()) == {100.0}
    case = "6 x 128, 1 at once, host absent, beside vllm"
    assert (rows[f"{case}, share"].limit, rows[f"{case}, share"].ratio) == (25.0, 4.0)
    assert rows[case].limit == round(12 * service.SIZE / 2.0 / 1e6, 4)
    lines = (tmp_path / "log").read_text().splitlines()
    done = [line for line in lines if not line.startswith(("open", "close"))]
    assert done == ["save ", "back 1", "back 1"] * 2 + ["finish "]
    slots = {line for line in lines if line.startswith("open")}
    assert slots == {f"open {service.TRANSIT + own}" for own in (0, 16)}, "as much as ours"


def test_engines_take_turns_and_ours_is_beside_vllms_tiers_and_beside_none(
    python: MakePython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PAUSE", 0.0)
    slower = python("""
kind = sys.argv[-1]
class Answers:
    def prepare(self): print(kind, "prepare", file=log)
    def round(self, number):
        print(kind, "round", number, file=log)
        seconds = {"none": 0.8, "vllm": 0.2, "ours": 0.1}[kind] * (1 + number)
        cost = {"seconds": seconds, "processor": seconds, "cached": 480,
                "steps_per_second": 1 / seconds}
        return dict.fromkeys(("new", "host", "storage", "beside"), cost)
    def close(self): print(kind, "close", file=log)
""")
    report = engine.run(quick=True, vllm_python=slower)
    rows = by_case(report)
    assert report.settings["cached tokens of a prompt from host"] == 480
    from_host = rows["first token, prompt from host", engine.VLLM]
    assert (from_host.ours, from_host.limit, from_host.ratio) == (150.0, 300.0, 2.0)
    assert rows["first token, prompt from host, without tiers", engine.NONE].ratio == 8.0
    steps = rows["steps with transfers in flight", engine.VLLM]
    assert steps.ratio == pytest.approx(2.0)
    prepared = [f"{kind} prepare" for kind in engine.KINDS]
    first = [f"{kind} round 0" for kind in ("none", "vllm", "ours")]
    second = [f"{kind} round 1" for kind in ("vllm", "ours", "none")]
    closed = [f"{kind} close" for kind in engine.KINDS]
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [*prepared, *first, *second, *closed]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo \"ModuleNotFoundError: No module named 'vllm'\" >&2; exit 1",
            r"tests\.interop\.setup",
        ),
        ("echo 'the engine fails' >&2; exit 3", "the engine fails"),
        ("exec sleep 600", r"engine_child\.py none was not done in"),
    ],
)
def test_an_engine_that_does_not_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, text: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(frame, "LIMIT", 0.05)
        monkeypatch.setattr(frame, "ENDING", 0.05)
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match=text):
        engine.run(quick=True, vllm_python=str(path))
