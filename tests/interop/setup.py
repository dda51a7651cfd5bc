"""Make the virtual environments of the consumers, from a package index alone: `python -m
tests.interop.setup DIR [GROUP ..]`.

An environment that is there and was made from the same pins is left as it is. Where an environment
needs kvactors, this clone is installed in editable mode, again only when its native module has
changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from pathlib import Path

from tests.interop.environments import (
    CLONE_STAMP,
    PINS,
    ROOT,
    STAMP,
    InteropError,
    Pins,
    clone_stamp,
    made_from,
    pins,
    source_folder,
)

BUDGET = 1800.0
"""Seconds that all environments together may take, beside other work of two cores."""
AT_ONCE = 2
"""Environments made at once."""
PROGRAMS = {"unshare": "util-linux", "ip": "iproute2", "etcd": "etcd-server"}
LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1"}
"""Programs and libraries that the tests need beside the environments, with their Debian packages."""


def missing_packages() -> list[str]:
    """The Debian packages that the tests need and this machine lacks."""
    programs = [PROGRAMS[name] for name in PROGRAMS if shutil.which(name) is None]
    return programs + [LIBRARIES[name] for name in LIBRARIES if find_library(name) is None]


def make(directory: Path, one: Pins, until: float) -> str:
    """Make one environment unless it exists. Returns what was done."""
    folder = directory / one.name
    begun = time.monotonic()
    steps = []
    if made_from(folder) != one.stamp:
        _make_packages(folder, one, until)
        steps.append("made")
    if one.clone and made_from(folder, CLONE_STAMP) != clone_stamp():
        _install_clone(folder, one, until)
        steps.append("kvactors installed")
    return f"{', '.join(steps)} in {time.monotonic() - begun:.0f} s" if steps else "is there"


def _pip(folder: Path, command: str, *options: str) -> list[str]:
    python = str(folder / "bin" / "python")
    return [python, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *options]


def _make_packages(folder: Path, one: Pins, until: float) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        # A copy of the interpreter that is written while another thread starts a process is open
        # in that process for a moment, and cannot be run ("Text file busy").
        venv.EnvBuilder(symlinks=True, with_pip=bool(one.packages or one.bare)).create(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InteropError(f"{folder}: cannot make a virtual environment: {error}") from None
    if one.base:
        _see_packages(folder, folder.parent / one.base)
    install = _pip(folder, "install", "--no-compile")
    if one.packages:
        run(one, [*install, *one.packages], until)
    if one.bare:
        run(one, [*install, "--no-deps", *one.bare], until)
    for requirement in one.sources:
        unpack_source(folder, one, requirement, until)
    if one.check:
        run(one, [str(folder / "bin" / "python"), "-c", one.check], until)
    (folder / STAMP).write_text(json.dumps(one.stamp, indent=1))


def _see_packages(folder: Path, base: Path) -> None:
    """Add the packages of another environment, those in editable mode too. The environment's own
    packages are found first."""
    (packages,) = folder.glob("lib/python*/site-packages")
    (seen,) = base.glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(f"import site; site.addsitedir({str(seen)!r})\n")


def unpack_source(folder: Path, one: Pins, requirement: str, until: float) -> None:
    """Keep parts of a source distribution, with the compiled modules of the installed package of
    that name beside its Python files."""
    target = source_folder(folder, requirement)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as download:
        only_source = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:")
        command = _pip(folder, "download", *only_source, "--dest", download, requirement)
        version = requirement.partition("==")[2]
        variables = {
            name: value.replace("VERSION", version)
            for name, value in one.source_environment.items()
        }
        run(one, command, until, variables)
        (archive,) = Path(download).iterdir()
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                _, _, member.name = member.name.partition("/")
                if member.name.partition("/")[0] in one.source_parts:
                    tar.extract(member, target, filter="data")
    package = requirement.partition("==")[0]
    for installed in folder.glob(f"lib/python*/site-packages/{package}/*.so"):
        if (target / package).is_dir():
            (target / package / installed.name).symlink_to(installed)


def _install_clone(folder: Path, one: Pins, until: float) -> None:
    """Install this clone in editable mode, built outside the clone."""
    stamp = clone_stamp()
    (folder / CLONE_STAMP).unlink(missing_ok=True)
    options = ("--no-deps", "--no-build-isolation", "-C", f"build-dir={folder}/kvactors-build")
    run(one, _pip(folder, "install", *options, "--editable", str(ROOT)), until)
    run(one, [str(folder / "bin" / "python"), "-c", "import kvactors._native"], until)
    (folder / CLONE_STAMP).write_text(json.dumps(stamp, indent=1))


def run(
    one: Pins, command: Sequence[str], until: float, environment: dict[str, str] | None = None
) -> None:
    """Run a command of an environment. InteropError with the end of its output if it fails or takes
    too long."""
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(1.0, until - time.monotonic()),
            check=False,
            cwd=ROOT,
            env=os.environ | (environment or {}),
        )
    except subprocess.TimeoutExpired:
        raise InteropError(f"{one.name}: not done in time: {shown}") from None
    except OSError as error:
        raise InteropError(f"{one.name}: {shown}: {error}") from None
    if done.returncode:
        raise InteropError(
            f"{one.name}: exit status {done.returncode} of: "
            f"{shown}\n{(done.stdout + done.stderr)[-3000:]}"
        )


def setup(directory: Path, groups: Sequence[str], path: Path = PINS) -> list[str]:
    """Make every environment of some groups. Returns a line for each. InteropError names those that
    could not be made."""
    known = pins(path)
    unknown = set(groups) - known.keys()
    if unknown:
        raise InteropError(
            f"there is no group {min(unknown)!r} of environments: use one of {', '.join(known)}"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InteropError(f"{directory}: {error}") from None
    until = time.monotonic() + BUDGET
    wanted = [one for group in groups for one in known[group]]
    lines, failures = [], []
    for some in ([one for one in wanted if not one.base], [one for one in wanted if one.base]):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = [(one, pool.submit(make, directory, one, until)) for one in some]
        for one, result in results:
            try:
                lines.append(f"{directory / one.name}: {result.result()}")
            except InteropError as error:
                failures.append(str(error))
        if failures:
            raise InteropError("\n".join(failures))
    return lines


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop.setup", description=__doc__)
    parser.add_argument(
        "directory", type=Path, help="folder of the environments; made if it is not there"
    )
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="GROUP",
        help="groups of environments (pins.toml); all if none is named",
    )
    given = parser.parse_args()
    try:
        for line in setup(given.directory.resolve(), given.groups or list(pins())):
            print(line)
        if missing_packages():
            print(f"the tests need: apt-get install {' '.join(missing_packages())}")
    except InteropError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
