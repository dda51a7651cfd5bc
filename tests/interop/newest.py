"""Warns of versions of the engines that are newer than those of `pins.toml`: `python -m
tests.interop.newest DIR`, where DIR has the environments of the group `engines`.

Each newer release and pre-release runs one test. A failure is a warning: kvactors supports the
versions that are pinned. Without a package index no test runs, and a line names the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.interop.environments import PINS, ROOT, InteropError, pins, source_folder
from tests.interop.setup import make, unpack_source

INDEX_S, MAKE_S, TEST_S = 60.0, 300.0, 300.0
"""Seconds for an answer of the index, for an environment, and for a test."""
BASE = "vllm_cpu"


class Engine(NamedTuple):
    """A package, the environment that has it, and the test that a newer version runs."""

    package: str
    environment: str
    test: str


ENGINES = (
    Engine("lmcache", "lmcache", "test_lmcache.py::test_every_chunk_comes_back"),
    Engine("sglang", "sglang_cpu", "test_sglang.py::test_the_linker_brings_pages"),
    Engine("vllm", BASE, "test_offloading.py::test_more_prompts_at_once"),
)


def newest(python: Path, package: str, *options: str) -> str:
    """The newest version of a package.

    Raises:
        InteropError: the index does not answer.
    """
    command = [str(python), "-m", "pip", "index", "versions", "--retries=1", package, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INDEX_S, check=False)
    except subprocess.TimeoutExpired:
        raise InteropError(f"the package index did not answer in {INDEX_S:.0f} s") from None
    found = re.match(rf"{package} \((\S+)\)", done.stdout)
    if found is None:
        raise InteropError(f"the package index has no versions of {package}: {done.stderr[-300:]}")
    return found[1]


def run(directory: Path, engine: Engine, version: str) -> None:
    """Run the test of an engine with a version.

    Raises:
        InteropError: the version cannot be installed, or the test fails.
    """
    until = time.monotonic() + MAKE_S
    file, _, test = engine.test.partition("::")
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "pins.toml"
        pinned = rf'"{engine.package}==[^"]*"'
        changed.write_text(re.sub(pinned, f'"{engine.package}=={version}"', PINS.read_text()))
        path = PINS if engine.environment == BASE else changed
        (one,) = (one for one in pins(path)["engines"] if one.name == engine.environment)
        (Path(folder) / BASE).symlink_to(directory / BASE)
        if engine.environment != BASE:
            make(Path(folder), one, until)
        elif not source_folder(directory / BASE, f"vllm=={version}").is_dir():
            # its Python runs over the compiled modules of the installed version
            unpack_source(directory / BASE, one, f"vllm=={version}", until)
        command = ["-m", "pytest", "-q", "-m", "engines", f"--interop={folder}"]
        command += [f"tests/interop/engines/{file}", "-k", f"{test} and not next and not False"]
        variables = {"INTEROP_PINS": str(path), "INTEROP_VLLM": version}
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=os.environ | variables,
                capture_output=True,
                text=True,
                timeout=TEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InteropError(f"{test} did not end in {TEST_S:.0f} s") from None
        if done.returncode:
            raise InteropError(f"{test} fails:\n{done.stdout[-3000:]}")


def main(directory: Path) -> None:
    """Print a line for each version."""
    known = PINS.read_text()
    for engine in ENGINES:
        try:
            python = directory / BASE / "bin" / "python"
            versions = {newest(python, engine.package, *more) for more in ((), ("--pre",))}
        except InteropError as error:
            print(f"{engine.package}: skipped: {error}")
            continue
        for version in sorted(versions):
            if f'"{engine.package}=={version}"' in known:
                print(f"{engine.package} {version}: is pinned")
                continue
            try:
                run(directory, engine, version)
                print(f"{engine.package} {version}: is newer than the pinned one, and works")
            except InteropError as error:
                print(f"WARNING: {engine.package} {version}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
