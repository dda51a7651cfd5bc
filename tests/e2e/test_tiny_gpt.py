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
