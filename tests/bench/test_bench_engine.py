"""The benchmark inside vLLM: its report, of engines that a stand-in plays, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvactors import ConfigError
from kvactors.bench import engine
from kvactors.cli import main

FIGURES: dict[str, Any] = {
    "first_token_ms": {"host": 10.0, "storage": 20.0},
    "cached": {"host": 480, "storage": 480},
    "steps_per_second": 50.0,
    "lookup_us": 2.0,
    "lookups": 100,
    "load_ms": 3.0,
    "store_ms": 4.0,
}


def stand_in(folder: Path, script: str) -> str:
    """A program in the place of a Python that has vLLM."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_ours_is_beside_vllms_tiers_and_beside_none(tmp_path: Path) -> None:
    slower = FIGURES | {"first_token_ms": {"host": 30.0, "storage": 40.0}, "lookup_us": 4.0}
    slower |= {"steps_per_second": 25.0}
    lines = {"none": slower, "vllm": slower, "ours": FIGURES}
    cases = "".join(f"{kind}) echo '{json.dumps(figures)}';;" for kind, figures in lines.items())
    python = stand_in(tmp_path, f'[ "$VLLM_NO_USAGE_STATS" = 1 ] && case "$3" in {cases} esac')
    report = engine.run(quick=True, vllm_python=python)
    assert (report["name"], report["settings"]["rounds"]) == ("engine", 2)
    rows = {(row["case"], row["limit_name"]): row for row in report["rows"]}
    assert len(rows) == 9
    assert rows["look-up, per call", engine.PEER]["ratio"] == 2.0
    assert rows["first token of a prompt from host", engine.PEER]["ratio"] == 3.0
    assert rows["steps with transfers in flight", engine.PEER]["ratio"] == 2.0
    assert rows["steps with transfers in flight, without tiers", engine.NONE]["ratio"] == 2.0


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


def test_a_python_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-python.*tests\.interop\.setup DIR engines"):
        engine.run(vllm_python=str(tmp_path / "no-python"))


def test_without_vllm_the_command_names_what_makes_an_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "needs a Python that has vLLM and kvactors" in message
    assert "python -m tests.interop.setup DIR engines" in message
