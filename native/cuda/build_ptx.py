"""Build the PTX file of the package from the source beside this file. Needs nvcc, which installing
the package does not.

python native/cuda/build_ptx.py            writes the file
python native/cuda/build_ptx.py --print    prints it instead
"""

# ruff: noqa: INP001
from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = HERE / "block_copy.cu"
TARGET = ROOT / "kvactors" / "data_plane" / "cuda" / "kernels.ptx"
VERSION = "7.4"
"""The oldest PTX version that has all the kernel uses (drivers from CUDA 11.4 on take it). nvcc
would write its own version."""

HEADER = "// Made by native/cuda/build_ptx.py from block_copy.cu; not to be edited.\n"


def make() -> str:
    """The PTX text, without comments (nvcc's name its version and paths) and labelled `VERSION`.
    CalledProcessError if nvcc fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.ptx"
        command = [
            "nvcc",
            "-ptx",
            "-arch=compute_80",
            "-O3",
            "-std=c++17",
            "-o",
            str(out),
            str(SOURCE),
        ]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - our own command line
        text = out.read_text("ascii")
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"^\.version .*$", f".version {VERSION}", text, flags=re.MULTILINE)
    lines = [line.rstrip() for line in text.splitlines()]
    return HEADER + "\n".join(line for line in lines if line) + "\n"


if __name__ == "__main__":
    if "--print" in sys.argv[1:]:
        sys.stdout.write(make())
    else:
        TARGET.write_text(make(), "ascii")
