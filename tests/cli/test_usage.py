"""What a command refuses: one line on standard error that names the argument, and status 2."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from kvactors import cli
from tests.cli.test_command_line import SCENARIO, TRACE

FILES = {
    "s.toml": SCENARIO.format(4),
    "key.toml": "[cache]\nblok_size = 4\n[scenario]\nname = 's'",
    "cut.toml": "[scenario",
    "empty.toml": "",
    "many.toml": SCENARIO.format("'many'"),
    "expect.toml": SCENARIO.format(4).replace("requests", "reqests"),
    "t.jsonl": "".join(f"{json.dumps({'timestamp': 0, 'hash_ids': ids})}\n" for ids in TRACE),
}
WRONG = [
    ("nonsense", ""),
    ("run", "SCENARIO"),
    ("run s.toml --bogus 1", "--bogus"),
    ("run none.toml", "none.toml"),
    ("run .", ""),
    ("run loop.toml", "loop.toml: Too many levels of symbolic links"),
    ("config check loop.toml", "loop.toml: Too many levels of symbolic links"),
    ("config show loop.toml", "loop.toml: Too many levels of symbolic links"),
    ("run s.toml --seed x", "--seed"),
    ("run s.toml --seed=-1", "a seed is 0 or more, not -1"),
    ("run quickstart --virtual", ""),
    ("run key.toml", "Did you mean 'block_size'"),
    ("run cut.toml", "at end of document"),
    ("run empty.toml", "scenario"),
    ("run many.toml", "expect"),
    ("run expect.toml", "reqests"),
    ("run s.toml --metrics-port 70000", "the metrics endpoint is 0 to 65535, not 70000"),
    ("run s.toml --metrics-port=-1", "the metrics endpoint is 0 to 65535, not -1"),
    ("run s.toml --metrics-port 0 --metrics-host ''", "the metrics endpoint needs a host"),
    ("run s.toml --json none/r.json", "there is no folder"),
    ("run s.toml --json .", "is a folder"),
    ("run s.toml --json cut.toml/r.json", "no folder"),
    ("replay s.toml", ""),
    ("replay none.jsonl", "none.jsonl"),
    ("replay t.jsonl --speed 20", "--speed needs --timed"),
    ("config check", "config check needs a file"),
    ("config check none.toml", "none.toml: No such file or directory"),
    ("size meta/none", "meta/none: No such file or directory"),
    ("size key.toml --dtype uint8", "--dtype is for a model"),
    ("sweep none.jsonl", "none.jsonl"),
    ("sweep t.jsonl --coarse 0", "coarse must be at least 1"),
    ("sweep t.jsonl --json - --html=-", "only one output"),
    ("sweep t.jsonl --json --html -", "--html is an option"),
    ("sweep t.jsonl --html", "requires an argument"),
    ("sweep t.jsonl --device '8 GiB'", "'8 GiB' is in bytes, and the bytes of a block are not"),
    ("sweep t.jsonl --device '1 KiB' --block-bytes 2k", "is 1 KiB, and one block takes 2"),
    ("sweep t.jsonl --device 0", "--device must be at least one block, not 0"),
    ("sweep t.jsonl --device=-4", "--device must be at least one block, not -4"),
    ("sweep t.jsonl --device many", "--device must be a size in bytes"),
    (f"sweep t.jsonl --device {'9' * 400}", "--device must be at most"),
    ("sweep t.jsonl --device 4 --block-bytes 0", "--block-bytes must be at least 1"),
    ("sweep t.jsonl --device 4 --block-bytes x", "--block-bytes must be a size in bytes"),
]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "loop.toml").symlink_to("loop.toml")


@pytest.mark.parametrize(("line", "complaint"), WRONG)
def test_a_wrong_argument_is_one_line_and_status_2(kvactors, line, complaint, monkeypatch):
    if "--json" in line:
        monkeypatch.setattr(cli, "run_scenario", lambda *_, **__: pytest.fail("it ran"))
    status, out, err = kvactors(*shlex.split(line))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kvactors: ")
    assert complaint in err


@pytest.mark.parametrize("command", ["run", "replay", "sweep"])
def test_a_page_without_its_extra_is_refused_before_any_work(kvactors, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = kvactors(command, "/nowhere", "--html", "r.html")
    assert (status, out) == (2, "")
    assert "kvactors[cli,report]" in err
