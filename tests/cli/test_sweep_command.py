"""`kvactors sweep`."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

TRACE = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]]
CONFIG = """
[cache]
block_size = 4
[device]
num_blocks = 4
[layout]
num_layers = 1
num_kv_heads = 1
head_dim = 4
dtype = "uint8"
[replay]
limit = 3
"""


@pytest.fixture
def kvactors(kvactors):
    return partial(kvactors, "sweep")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(json.dumps({"timestamp": i, "hash_ids": ids}) + "\n" for i, ids in enumerate(TRACE))
    )
    return path


def test_it_writes_what_it_is_asked_for(kvactors, trace, tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG)
    names = {kind: tmp_path / f"r.{kind}" for kind in ("json", "html", "png")}
    options = [word for kind, path in names.items() for word in (f"--{kind}", path)]
    status, out, err = kvactors(trace, "--config", tmp_path / "c.toml", *options)
    assert (status, err) == (0, "")
    assert "most hits possible" in out
    report = json.loads(names["json"].read_text())
    assert report["requests"] == 3
    assert report["block_bytes"] == 32
    assert report["tiers"]["refused"] == 0
    assert names["html"].read_text().startswith("<!doctype html>")
    assert names["png"].stat().st_size > 1000


def test_bad_input_is_one_line_and_status_2(kvactors, trace, tmp_path):
    for arguments, words in (
        ((tmp_path / "none.jsonl",), "none.jsonl"),
        ((trace, "--device", 0), "at least one block"),
        ((trace, "--coarse", 0), "coarse must be at least 1"),
        ((trace, "--json", "-", "--html=-"), "only one output"),
        ((trace, "--json", "--html", "-"), "--html is an option"),
        ((trace, "--html"), "requires an argument"),
    ):
        status, _, err = kvactors(*arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert words in err


def test_without_matplotlib_the_missing_extra_is_named_before_any_work(kvactors, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = kvactors("no_such_trace.jsonl", "--html", "r.html")
    assert status == 2
    assert "kvactors[report]" in err


def test_sizes_are_blocks_or_bytes(kvactors, trace, tmp_path):
    report = tmp_path / "r.json"
    for sizes in (("--device", 2, "--device", 4), ("--device", "2 KiB", "--device", "4.5k")):
        status, _, err = kvactors(trace, *sizes, "--block-bytes", "1 KiB", "--json", report)
        assert (status, err) == (0, "")
        assert [one["blocks"] for one in json.loads(report.read_text())["points"]] == [2, 4]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--device", "8 GiB"), "--device '8 GiB' is in bytes, and the bytes of a block are not"),
        (("--device", "1 KiB", "--block-bytes", "2k"), "--device is 1 KiB, and one block takes 2"),
        (("--device", "0"), "--device must be at least one block, not 0"),
        (("--device=-4",), "--device must be at least one block, not -4"),
        (("--device", "many"), "--device must be a size in bytes"),
        (("--device", "9" * 400), "--device must be at most"),
        (("--device", "4", "--block-bytes", "0"), "--block-bytes must be at least 1"),
        (("--device", "4", "--block-bytes", "x"), "--block-bytes must be a size in bytes"),
    ],
)
def test_a_size_that_cannot_be_is_named(kvactors, trace, options, error):
    status, out, err = kvactors(trace, *options)
    assert (status, out) == (2, "")
    assert error in err
    assert len(err.splitlines()) == 1
