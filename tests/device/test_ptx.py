"""The kernels' text that is shipped is the one their source gives, and their source is right."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
BUILD = runpy.run_path(str(NATIVE / "cuda" / "build_ptx.py"))
SHIPPED = Path(__file__).parents[2] / "kvactors" / "data_plane" / "cuda" / "kernels.ptx"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_shipped_text_is_made_by_nvcc_from_the_source():
    """Another nvcc may make other text of it: then the file is to be made anew, by
    native/cuda/build_ptx.py."""
    assert BUILD["make"]() == SHIPPED.read_text("ascii")


def test_the_shipped_text_suits_old_drivers_and_holds_nothing_of_the_machine():
    text = SHIPPED.read_text("ascii")
    assert ".version 7.4\n.target sm_80\n" in text
    assert ".entry kvactors_gather(" in text
    assert ".entry kvactors_scatter(" in text
    assert "/" not in text.removeprefix(BUILD["HEADER"])
    assert text.count("ld.global.cs.v4") >= 4, "four vector loads in flight"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_it_assembles(target, tmp_path):
    command = ["ptxas", f"-arch={target}", "-v", "-o", tmp_path / "out.cubin", SHIPPED]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        "bytes spill" not in done.stderr
        or "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_every_thread_played_under_sanitizers(tmp_path):
    flags = [
        "-std=c++17",
        "-g",
        "-O1",
        "-Wno-unknown-pragmas",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    command = ["g++", *flags, NATIVE / "tests" / "test_block_copy.cpp", "-o", tmp_path / "test"]
    for step in (command, [tmp_path / "test"]):
        done = subprocess.run(step, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
