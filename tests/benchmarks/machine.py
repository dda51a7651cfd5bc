"""A description of the machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvactors.cli import version as kvactors_version

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


def describe(folder: Path | None = None) -> dict[str, str]:
    """The machine as (name, text), in the order in which it is printed.

    Args:
        folder: where benchmarks write their files. None: the system's temporary folder.
    """
    return {
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.0f} GiB",
        "disk": disk(folder or Path(os.environ.get("TMPDIR", "/tmp"))),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "kvactors": f"{kvactors_version()}{commit()}",
    }


def processor(info: str | None = None) -> str:
    """The processor's model with the extensions that the native code uses, from /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text() if info is None else info
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    named = (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("sha_ni", "SHA"))
    found = [name for flag, name in named if flag in flags]
    model = fields.get("model name") or platform.machine()
    return f"{model} ({', '.join(found)})" if found else model


def disk(folder: Path, mounts: str | None = None) -> str:
    """The file system and the device of a folder, from /proc/self/mounts."""
    try:
        text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    except OSError:
        return "unknown"
    place = folder.resolve()
    best = ("", "unknown")
    for line in text.splitlines():
        device, point, kind, *_ = line.split()
        inside = point == "/" or place == Path(point) or Path(point) in place.parents
        if inside and len(point) >= len(best[0]):
            best = (point, f"{kind} on {Path(device).name}")
    return best[1]


def commit() -> str:
    """The commit of this clone, with a `+` if files differ from it. Empty outside a clone."""
    git = ("git", "-C", str(ROOT))
    try:
        found = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", "kvactors", "native"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" {found.stdout.strip()}{'+' if changes.stdout.strip() else ''}"


def versions(python: str, packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that an interpreter has.

    Args:
        python: the interpreter, empty for this one.
        packages: names of distributions.
    """
    names = list(packages)
    if not python or Path(python).absolute() == Path(sys.executable).absolute():
        found = {}
        for name in names:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found
    code = (
        "import sys\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        print(name, version(name))\n"
        "    except PackageNotFoundError:\n"
        "        pass\n"
    )
    answer = subprocess.run(
        [python, "-c", code, *names], capture_output=True, text=True, check=True, timeout=60
    )
    return dict(line.split() for line in answer.stdout.splitlines())
