"""A tiny GPT is served from its cache with the same bits as without one, and the comparison sees
what it must see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvactors

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[2] / "scenarios" / "serve_tiny_gpt.py"
ROOT = Path(kvactors.__file__).parents[1]


def serve(tmp_path, *arguments, conversations=4, turns=3):
    """The script's exit code, its output, and its counts."""
    out = tmp_path / "out.json"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        str(SCRIPT),
        "--conversations",
        str(conversations),
        "--turns",
        str(turns),
        "--json",
        str(out),
        *arguments,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert out.exists(), done.stderr
    return done.returncode, done.stderr, json.loads(out.read_text("utf-8"))


def assert_same_bits(code, said, counted, positions=4 * 3 * 16):
    assert (code, counted["complaints"]) == (0, []), said
    plain, cached = counted["plain"], counted["kvactors"]
    assert counted["positions"] == positions
    assert plain["reused"] == 0
    assert cached["computed"] < plain["computed"]
    assert (
        min(
            cached[tier]
            for tier in ("device", "host", "storage", "preemptions", "device_evictions")
        )
        > 0
    )


@pytest.mark.parametrize("layout", ["gqa", "mla"])
def test_the_same_bits_from_every_tier(tmp_path, layout):
    assert_same_bits(*serve(tmp_path, "--layout", layout))


@pytest.mark.parametrize("layout", ["gqa", "mla"])
def test_the_same_bits_with_speculation(tmp_path, layout):
    code, said, counted = serve(tmp_path, "--layout", layout, "--speculate")
    assert_same_bits(code, said, counted)
    assert 0 < counted["kvactors"]["accepted"] < counted["kvactors"]["drafted"]
    assert counted["plain"]["drafted"] == 0


@pytest.mark.parametrize("options", [(), ("--speculate",), ("--ranks", "2")])
def test_the_same_bits_with_chunked_prefill(tmp_path, options):
    code, said, counted = serve(tmp_path, "--chunk-tokens", "32", *options)
    assert_same_bits(code, said, counted)
    assert counted["kvactors"]["continued"] > 0
    assert counted["plain"]["continued"] == 0


def test_the_same_bits_after_a_restart(tmp_path):
    assert_same_bits(*serve(tmp_path, "--restart"))


@pytest.mark.parametrize(
    ("layout", "fault"), [("gqa", "swap_blocks"), ("gqa", "flip_bit"), ("mla", "swap_blocks")]
)
def test_spoilt_blocks_are_seen(tmp_path, layout, fault):
    code, said, counted = serve(
        tmp_path, "--layout", layout, "--break", fault, conversations=3, turns=2
    )
    assert code == 1
    assert f"--break: {fault} on blocks" in said
    assert counted["complaints"][0].startswith("logits differ at")


@pytest.mark.parametrize("layout", ["gqa", "mla"])
def test_the_same_bits_with_heads_on_two_ranks(tmp_path, layout):
    assert_same_bits(*serve(tmp_path, "--layout", layout, "--ranks", "2"))


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ("window,full", ()),
        ("state,full", ("--restart",)),
        ("window,state,full", ("--chunk-tokens", "32", "--layout", "mla")),
    ],
)
def test_the_same_bits_from_windows_and_states(tmp_path, layers, options):
    """With forks. Every group has hits from every tier, else the script complains."""
    found = serve(tmp_path, "--layers", layers, "--samples", "2", *options, conversations=6)
    assert_same_bits(*found, positions=6 * 3 * 16 * 2)
    assert found[2]["kvactors"]["forks"] > 0
    assert [*found[2]["kvactors"]["groups"]] == layers.split(",")[:-1]


@pytest.mark.parametrize(
    ("layers", "fault"), [("window,full", "flip_bit"), ("state,full", "swap_blocks")]
)
def test_spoilt_blocks_of_a_group_are_seen(tmp_path, layers, fault):
    code, said, counted = serve(
        tmp_path, "--layers", layers, "--break", fault, conversations=3, turns=2
    )
    assert code == 1
    assert f"--break: {fault} on blocks" in said
    assert counted["complaints"][0].startswith("logits differ at")


def test_options_that_do_not_fit():
    """In one process: the imports take most of the time."""
    cases = {
        ("--layers", "window,fool"): "--layers has 'fool': choose from full, window, state",
        ("--http", "0", "--break", "flip_bit"): "--break has no effect with --http",
        ("--layers", "state"): "--layers has no full layer among its first 4",
        ("--layers", "state,full", "--ranks", "2"): "groups work in one process",
        ("--layers", "state,full", "--speculate"): "a state cannot go back",
    }
    script = f"""
import runpy, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
parse = runpy.run_path({str(SCRIPT)!r})["parse"]
for arguments in {list(cases)!r}:
    try:
        parse(arguments)
    except SystemExit as error:
        print("exit", error.code, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    said = " ".join(done.stderr.split())
    assert said.count("exit 2") == len(cases), said
    assert all(one in said for one in cases.values()), said
