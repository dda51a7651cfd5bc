"""Runs the core tests with exactly the lowest versions of the dependencies that pyproject.toml
declares: `python -m tests.packaging.floors WHEEL`.

The tests run in a copy without the sources, so that they use the installed wheel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from tests.packaging.wheels import ROOT, environment, wheel_for

REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*>=\s*([0-9][0-9.]*)[^;]*")

EXTRAS = ("cli", "kv-events")
"""Extras whose floors are tested too."""

COPIED = ("tests", "scenarios", "docs", "pyproject.toml", "README.md", "SECURITY.md")

OF_THE_SOURCES = (
    "tests/actor/test_channels.py",
    "tests/observe/test_log_lines.py",
    "tests/config/test_environment.py",
)
"""Tests that read the sources of the package, which the copy lacks."""

TESTS = (
    "tests/actor",
    "tests/cache/test_life.py",
    "tests/cli/test_command_line.py",
    "tests/cli/test_shipped.py",
    "tests/config",
    "tests/layout",
    "tests/observe",
    "tests/prefix_index/test_keys.py",
    "tests/storage/test_catalog.py",
    "tests/storage/test_file_store.py",
    "tests/testing/test_plugin.py",
)
"""Tests that use every dependency."""


def floors(project: dict[str, Any]) -> list[str]:
    """The dependencies at their lowest versions, as pip takes them.

    Raises:
        ValueError: a dependency has no lowest version.
    """
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(one for name in EXTRAS for one in extras[name])]
    found = []
    for one in declared:
        match = REQUIREMENT.fullmatch(one)
        if match is None:
            raise ValueError(f"{one} has no lowest version")
        found.append(f"{match[1]}=={match[2]}")
    return found


def main() -> None:
    """Install and test. The exit status is that of pytest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = floors(project)
    print("floors:", *pinned)
    began = time.monotonic()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    given = Path(sys.argv[1])
    wheel = wheel_for(given.glob("*.whl"), version) if given.is_dir() else given
    if wheel is None:
        raise ValueError(f"{given} has no wheel for CPython {version}")
    with tempfile.TemporaryDirectory(prefix="kvactors-floors-") as temporary:
        folder = Path(temporary)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pinned), "utf-8")
        bin_ = environment(
            folder / "venv", sys.executable, "-c", str(constraints), f"{wheel}[test-core]", *pinned
        )
        print(f"installed in {time.monotonic() - began:.0f} s", flush=True)
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)
        command = [bin_ / "python", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
        command += [f"--ignore={path}" for path in OF_THE_SOURCES]
        done = subprocess.run([*command, "-m", "not full", *TESTS], cwd=folder, check=False)
        print(f"{time.monotonic() - began:.0f} s in all")
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
