"""The environments of the consumers: pins, refusals, and environments that stay unchanged.
Without any network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.environments import (
    CLONE_STAMP,
    STAMP,
    Environments,
    InteropError,
    clone_stamp,
    pins,
)
from tests.interop.setup import setup

EMPTY = '[group.name]\npackages = []\nbare = []\ncheck = "import sys"\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[group.name]\npackages = ["a>=1"]\n', "not pinned"),
        ("[group.name]\npackage = []\n", "unknown field `package`"),
        ('[group.name]\nsources = ["a"]\n', "not pinned"),
        ('[group.name]\nbase = "other"\n[group.other]\n', "not an earlier environment"),
        ("[group", "Expected"),
    ],
)
def test_a_bad_file_of_pins_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "pins.toml"
    path.write_text(text)
    with pytest.raises(InteropError, match=error):
        pins(path)


def test_an_environment_is_made_once_and_again_when_its_pins_change(tmp_path: Path) -> None:
    path = tmp_path / "pins.toml"
    path.write_text(EMPTY)
    assert "made in" in setup(tmp_path / "there", ["group"], path=path)[0]
    assert setup(tmp_path / "there", ["group"], path=path)[0].endswith("is there")
    python = Environments(tmp_path / "there", path).program("name")
    assert (
        subprocess.run([python, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"
    )
    path.write_text(EMPTY.replace("import sys", "import os"))
    with pytest.raises(InteropError, match="was made from other pins"):
        Environments(tmp_path / "there", path).program("name")
    assert "made in" in setup(tmp_path / "there", ["group"], path=path)[0]


def test_an_environment_whose_check_fails_is_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "pins.toml"
    path.write_text(EMPTY.replace("import sys", "import no_such_module"))
    with pytest.raises(InteropError, match="no_such_module"):
        setup(tmp_path / "there", ["group"], path=path)
    assert not (tmp_path / "there" / "name" / STAMP).exists()


def test_a_missing_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(InteropError, match=r"is not there: run `python -m tests\.interop\.setup"):
        Environments(tmp_path).program("dynamo")


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
CASES = [
    ("interop", "tests/interop/test_router.py", "joined"),
    ("engines", "tests/interop/engines/test_offloading.py", "greedy"),
]


@pytest.mark.parametrize(("marker", "file", "case"), CASES)
def test_without_environments_a_test_fails_and_is_not_skipped(
    marker: str, file: str, case: str
) -> None:
    command = [*PYTEST, "-m", marker, file, "-k", case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert "--interop=DIR" in done.stdout


def test_tests_with_other_programs_are_left_out_unless_they_are_asked_for() -> None:
    files = [file for _, file, _ in CASES]
    done = subprocess.run(
        [*PYTEST, "--collect-only", *files], capture_output=True, text=True, check=False
    )
    assert "deselected" in done.stdout
    assert "0 selected" in done.stdout or "no tests" in done.stdout


def test_an_environment_with_another_clone_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "pins.toml"
    path.write_text(EMPTY + "clone = true\n")
    (one,) = pins(path)["group"]
    folder = tmp_path / "there" / "name"
    folder.mkdir(parents=True)
    (folder / STAMP).write_text(json.dumps(one.stamp))
    environments = Environments(tmp_path / "there", path)
    with pytest.raises(InteropError, match="another clone"):
        environments.program("name")
    (folder / CLONE_STAMP).write_text(json.dumps(clone_stamp() | {"sources": "0" * 64}))
    with pytest.raises(InteropError, match=r"before native/ changed"):
        environments.program("name")
    (folder / CLONE_STAMP).write_text(json.dumps(clone_stamp()))
    assert environments.program("name") == str(folder / "bin" / "python")
