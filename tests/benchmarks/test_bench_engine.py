"""The benchmark inside vLLM: its report, of engines that a stand-in plays, and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvactors import ConfigError
from tests.benchmarks import engine
from tests.benchmarks.__main__ import main

STAND_IN = """#!{python}
import json, os, sys
figures, kind = json.loads({figures!r}), sys.argv[-1]
assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
for line in sys.stdin:
    message = json.loads(line)
    with open({log!r}, "a") as log:
        log.write(f"{{kind}} {{message['do']}} {{message.get('number', '')}}\\n")
    answer = figures[kind] if message["do"] == "round" else {{}}
    if answer:
        for place in ("new", "host", "storage", "beside"):
            answer[place]["seconds"] *= 1 + message["number"]
    print(json.dumps(answer), flush=True)
"""
"""A program in the place of a Python that has vLLM. Its rounds take longer and longer."""


def figures(seconds: float, **tiers: float) -> dict[str, Any]:
    """A round."""
    cost = {"seconds": seconds, "processor": 2 * seconds, "cached": 480}
    cost |= {"steps": 5, "switches": 6, "preemptions": 7}
    places = {place: dict(cost) for place in ("new", "host", "storage", "beside")}
    return places | {"steps_per_second": 1 / seconds} | tiers


def stand_in(folder: Path, script: str) -> str:
    """A program in the place of a Python that has vLLM."""
    path = folder / "python"
    path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_ours_is_beside_vllms_tiers_and_beside_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PAUSE", 0.0)
    tiers: dict[str, float] = {"lookup_us": 2.0, "load_ms": 3.0, "store_ms": 4.0}
    tiers |= {f"{name} of": 10 for name in list(tiers)}
    rounds = {
        "none": figures(0.8),
        "vllm": figures(0.2, **(tiers | {"lookup_us": 4.0})),
        "ours": figures(0.1, **tiers),
    }
    log = tmp_path / "log"
    script = STAND_IN.format(python=sys.executable, figures=json.dumps(rounds), log=str(log))
    report = engine.run(quick=True, vllm_python=stand_in(tmp_path, script))
    assert (report["name"], report["settings"]["rounds"]) == ("engine", 2)
    assert report["settings"]["cached, host"] == {"none": 480, "vllm": 480, "ours": 480}
    rows = {(row["case"], row["limit_name"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 17
    assert rows["look-up, per call", engine.PEER]["ratio"] == 2.0
    from_host = rows["first token of a prompt from host", engine.PEER]
    assert (from_host["ours"], from_host["limit"], from_host["ratio"]) == (150.0, 300.0, 2.0)
    assert rows["steps with transfers in flight", engine.PEER]["ratio"] == 2.0
    assert rows["steps with transfers in flight, without tiers", engine.NONE]["ratio"] == 8.0
    prepared = [f"{kind} prepare " for kind in engine.KINDS]
    first = [f"{kind} round 0" for kind in ("none", "vllm", "ours")]
    second = [f"{kind} round 1" for kind in ("vllm", "ours", "none")]
    closed = [f"{kind} close " for kind in engine.KINDS]
    assert log.read_text().splitlines() == [*prepared, *first, *second, *closed]


def test_a_figure_that_no_round_has_is_named() -> None:
    with pytest.raises(ConfigError, match="store_ms"):
        engine.middle([{"store_ms": None}, {"store_ms": None}], "store_ms")
    assert engine.middle([{"store_ms": None}, {"store_ms": 3}], "store_ms") == 3.0


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo \"ModuleNotFoundError: No module named 'vllm'\" >&2; exit 1",
            r"tests\.interop\.setup",
        ),
        ("echo 'the engine fails' >&2; exit 3", "the engine fails"),
    ],
)
def test_an_engine_that_does_not_run_is_named(tmp_path: Path, script: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        engine.run(quick=True, vllm_python=stand_in(tmp_path, script))


def test_an_engine_that_hangs_is_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LIMIT", 0.05)
    monkeypatch.setattr(engine, "ENDING", 0.05)
    with pytest.raises(ConfigError, match="vLLM with none was not done in"):
        engine.run(quick=True, vllm_python=stand_in(tmp_path, "exec sleep 600"))


def test_a_python_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-python.*tests\.interop\.setup DIR engines"):
        engine.run(vllm_python=str(tmp_path / "no-python"))


def test_without_vllm_the_command_names_what_makes_an_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    assert main(["engine"]) == 2
    message = capsys.readouterr().err
    assert "needs a Python that has vLLM and kvactors" in message
    assert "python -m tests.interop.setup DIR engines" in message
