"""Scenarios and a trace by name, a source tree that is not built, systems other than Linux."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvactors
from kvactors.errors import ConfigError
from kvactors.scenario import shipped
from kvactors.scenario.shipped import SUFFIXES, find_file, find_toml, names_of
from kvactors.settings_report import config_check
from tests.scenario.small_chat import FILE, text

PACKAGE = Path(kvactors.__file__).parent


def test_names_of_the_package_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in SUFFIXES:
        names = names_of(kind)
        assert names
        for name in names:
            assert find_file(Path(name), kind).stem == name
    assert "quickstart" in names_of("scenario")
    assert find_file(Path("quickstart.toml"), "scenario").name == "quickstart.toml"
    (tmp_path / "quickstart").write_text("")
    assert find_file(Path("quickstart"), "scenario") == Path("quickstart"), (
        "the caller's comes first"
    )
    for wrong in ("quickstat", "no/quickstart", "quickstart.json"):
        with pytest.raises(ConfigError, match=f"there is no file {wrong}: .*quickstart"):
            find_file(Path(wrong), "scenario")


def test_files_of_an_installed_package_are_found(tmp_path, monkeypatch):
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "mine.toml").write_text("")
    monkeypatch.setattr(shipped, "INSTALLED", tmp_path)
    monkeypatch.chdir("/")
    assert find_file(Path("mine"), "settings") == tmp_path / "replay" / "mine.toml"


def test_the_small_trace_is_what_its_generator_writes():
    assert FILE.read_text("utf-8") == text(), "run: python -m tests.scenario.small_chat"


def unbuilt(tmp_path: Path) -> Path:
    """A clone whose native module has not been built."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "clone" / "kvactors", ignore=ignore)
    (tmp_path / "clone" / "native").mkdir()
    (tmp_path / "clone" / "native" / "CMakeLists.txt").write_text("")
    return tmp_path / "clone"


HIDDEN = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "kvactors" not in repr(type(f))]
sys.path.insert(0, {clone!r})
"""


def python(clone: Path, script: str, before: str = ""):
    """Python in a folder, whose kvactors comes first and which has no editable install of it."""
    return subprocess.run(
        [sys.executable, "-c", f"{HIDDEN.format(clone=str(clone))}\n{before}\n{script}"],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_names_of_the_package_are_checked_like_files(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert config_check(Path("no_room"), Path("conversation_device_3k_retain")) == 0
    printed = capfd.readouterr().out
    assert "no_room.toml: scenario, ok" in printed
    assert "conversation_device_3k_retain.toml: replay, ok" in printed
    own = tmp_path / "no_room"
    own.write_text("[cache]\nblock_size = 0\n")
    assert find_toml(Path("no_room")).read_text() == own.read_text()


RUN = "import runpy; sys.argv = ['kvactors', '--version']; runpy.run_module('kvactors', None, '__main__')"


def test_the_command_line_of_an_unbuilt_clone_names_the_remedy(tmp_path):
    clone = unbuilt(tmp_path)
    done = python(clone, RUN)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvactors: kvactors' native module is missing")
    assert f"{clone} is a source tree" in done.stderr
    assert "pip install -e ." in done.stderr


def test_the_command_line_without_a_dependency_names_it(tmp_path):
    done = python(unbuilt(tmp_path), RUN, before="sys.modules['cyclopts'] = None")
    assert done.returncode == 2
    assert done.stderr.startswith("kvactors: the command line needs the package 'cyclopts'")
    assert "pip install '/path/to/kvactors[cli]'" in done.stderr
    assert done.stderr.count("\n") == 1


ELSEWHERE = """
import sys, os, asyncio, ctypes, logging, mmap, multiprocessing, subprocess, tempfile
import aiofiles, anyio, cyclopts, msgspec, numpy, rich.console, rich.progress, structlog, xxhash
sys.platform = {system!r}
sys.modules["kvactors._native"] = None
if {system!r} == "win32":
    sys.modules["fcntl"] = None
    for name in ("register_at_fork", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"):
        delattr(os, name)
for name in ("eventfd", "posix_fallocate", "O_DIRECT", "fdatasync", "preadv"):
    delattr(os, name)
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_have_settings_and_sizes_and_a_named_error_for_the_rest(tmp_path, system):
    """The functions that these systems lack are removed, since none of them is at hand."""
    works = ["kvactors", *(f"kvactors.{one}" for one in ("settings", "layout", "errors"))]
    parts = ("cache", "tier_cache", "cli", "storage.file.store", "files", "threads", "native")
    needs = [f"kvactors.{one}" for one in parts]
    script = f"""
import importlib, json
found = {{}}
for name in {works + needs!r}:
    try:
        importlib.import_module(name)
        found[name] = ""
    except ImportError as error:
        found[name] = str(error)
import kvactors
try:
    kvactors.open
except ImportError as error:
    found["open"] = str(error)
print(json.dumps(found))
"""
    done = python(unbuilt(tmp_path), script, before=ELSEWHERE.format(system=system))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in works} == dict.fromkeys(works, "")
    reason = f"needs Linux (file locks, O_DIRECT, futexes), and this system is {system}"
    assert all(reason in found[name] for name in (*needs, "open"))
