"""A tiny GPT is served from its cache with the same bits as without one, and the comparison sees
what it must see."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCENARIOS = Path(__file__).parents[2] / "scenarios"


@pytest.fixture(scope="module")
def script():
    """The script as a module: the import of Paddle takes longer than most runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SCENARIOS), *sys.path])
        yield importlib.import_module("serve_tiny_gpt")


@pytest.fixture
def serve(script, tmp_path, capsys):
    """The script's exit code, its output, and its counts."""

    def run(*arguments, conversations=4, turns=3):
        out = tmp_path / "out.json"
        sizes = ("--conversations", str(conversations), "--turns", str(turns), "--json", str(out))
        code = script.main(script.parse([*sizes, *arguments]))
        said = capsys.readouterr().err
        assert out.exists(), said
        return code, said, json.loads(out.read_text("utf-8"))

    return run


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


def test_the_same_bits_from_every_tier(serve):
    assert_same_bits(*serve())


def test_the_same_bits_with_speculation(serve):
    code, said, counted = serve("--speculate", "--layout", "mla", "--chunk-tokens", "32")
    assert_same_bits(code, said, counted)
    assert 0 < counted["kvactors"]["accepted"] < counted["kvactors"]["drafted"]
    assert counted["plain"]["drafted"] == counted["plain"]["continued"] == 0
    assert counted["kvactors"]["continued"] > 0


def test_the_same_bits_with_heads_on_two_ranks(serve):
    found = serve("--ranks", "2", "--layout", "mla", "--chunk-tokens", "32")
    assert_same_bits(*found)
    assert found[2]["kvactors"]["continued"] > 0


@pytest.mark.parametrize(
    ("layout", "fault"), [("gqa", "swap_blocks"), ("gqa", "flip_bit"), ("mla", "swap_blocks")]
)
def test_spoilt_blocks_are_seen(serve, layout, fault):
    code, said, counted = serve("--layout", layout, "--break", fault, conversations=3, turns=2)
    assert code == 1
    assert f"--break: {fault} on blocks" in said
    assert counted["complaints"][0].startswith("logits differ at")


def test_the_same_bits_from_windows_and_states(serve):
    """With forks. Every group has hits from the device and from below, else the script complains."""
    layers = ("--layers", "window,state,full", "--layout", "mla")
    found = serve(*layers, "--samples", "2", "--restart", "--chunk-tokens", "32")
    assert_same_bits(*found, positions=4 * 3 * 16 * 2)
    assert found[2]["kvactors"]["forks"] > 0
    assert [*found[2]["kvactors"]["groups"]] == ["window", "state"]


@pytest.mark.parametrize(
    ("layers", "fault"), [("window,full", "flip_bit"), ("state,full", "swap_blocks")]
)
def test_spoilt_blocks_of_a_group_are_seen(serve, layers, fault):
    code, said, counted = serve("--layers", layers, "--break", fault, conversations=3, turns=2)
    assert code == 1
    assert f"--break: {fault} on blocks" in said
    assert counted["complaints"][0].startswith("logits differ at")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layers window,fool", "--layers has 'fool': choose from full, window, state"),
        ("--http 0 --break flip_bit", "--break has no effect with --http"),
        ("--layers state", "--layers has no full layer among its first 4"),
        ("--layers state,full --ranks 2", "groups work in one process"),
        ("--layers state,full --speculate", "a state cannot go back"),
    ],
)
def test_options_that_do_not_fit(script, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        script.parse(options.split())
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
