"""Carries out every `pip install` of kvactors in the pages and the error texts, each in a new
environment: `python -m tests.packaging.install_lines DIR`. DIR has the wheels (`make dist`).

Until kvactors is on an index, `/path/to/kvactors` stands for a clone or a wheel.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.packaging.wheels import ROOT, environment, run, wheel_for

COMMAND = re.compile(r"pip install (?P<text>[^`\n#]*)")
FORM = re.compile(
    r"(?:-\S+ )*(?P<quote>'?)(?P<place>/path/to/kvactors|\.)(?:\[(?P<extras>[\w,{}-]+)\])?(?P=quote)"
    r"(?P<others>(?: [a-z-]+)*)"
)
PLACES = ("*.md", "docs/**/*.md", "docs/deploy/**/*", "kvactors/**/*.py")

LARGE = {"paddle-gpu"}
"""Extras that are resolved only: their packages have gigabytes."""


class InstallLine(NamedTuple):
    """A command of a page. good: whether it has the one form. others: packages beside kvactors."""

    file: Path
    text: str
    good: bool
    of_clone: bool
    extras: tuple[str, ...]
    others: tuple[str, ...]


def install_lines() -> list[InstallLine]:
    """The commands of the pages and the error texts."""
    found = []
    files = {file for place in PLACES for file in ROOT.glob(place) if file.is_file()}
    for file in sorted(files):
        for command in COMMAND.finditer(file.read_text("utf-8")):
            form = FORM.match(command["text"])
            parts = form.groupdict("") if form else dict.fromkeys(("place", "extras", "others"), "")
            extras = tuple(one for one in parts["extras"].split(",") if one)
            others = tuple(parts["others"].split()) if file.suffix == ".md" else ()
            clone = parts["place"] == "."
            line = InstallLine(file, command["text"], form is not None, clone, extras, others)
            found.append(line)
    return found


def main() -> None:
    """Install each distinct line. RuntimeError with pip's output if one fails."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheel = wheel_for(Path(sys.argv[1]).glob("*.whl"), version)
    if wheel is None:
        sys.exit(f"{sys.argv[1]} has no wheel for CPython {version}")
    lines = {(one.extras, one.others) for one in install_lines() if not one.of_clone}
    for extras, others in sorted(lines - {(("cli", "{extra}"), ())}):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvactors-install-") as folder:
            named = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
            resolve = ["--dry-run"] if LARGE & set(extras) else []
            bin_ = environment(Path(folder), sys.executable, *resolve, named, *others)
            if not resolve:
                run(bin_ / "python", "-c", "import kvactors; kvactors.open", cwd=Path(folder))
            if "cli" in extras and not resolve:
                run(bin_ / "kvactors", "--version", cwd=Path(folder))
        print(
            f"{time.monotonic() - began:4.0f} s  {named.rpartition('/')[2]} {' '.join(others)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
