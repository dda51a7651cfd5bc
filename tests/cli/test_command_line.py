"""The command line: exit statuses, one-line complaints, reports."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import tomllib
import typing
from pathlib import Path

import pytest

from kvactors import cli
from kvactors.layout import make_layout
from kvactors.observe.lag import SCHEDSTAT
from kvactors.scenario.output import check_output
from kvactors.settings import Config

ROOT = Path(__file__).parents[2]
FIELDS = {
    "requests",
    "blocks_looked_up",
    "hit_rate",
    "verified_blocks",
    "corrupt_blocks_served",
    "flush",
    "loop_lag_ms",
    "messages",
    "wall_s",
    "errors",
}
SCENARIO = """
[scenario]
name = "small"
[cache]
block_size = 4
[layout]
num_layers = 1
[workload]
sessions = 2
turns = 2
system_tokens = 8
[expect]
requests = {}
"""


TRACE = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]]
SWEEP = """
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


def write(path, text):
    path.write_text(text)
    return path


def test_run_prints_a_table_and_writes_the_report(kvactors, tmp_path):
    path = write(tmp_path / "s.toml", SCENARIO.format(4))
    status, out, err = kvactors("run", path, "--json", tmp_path / "r.json", "--seed", 3)
    assert (status, err) == (0, "")
    assert "small" in out
    assert out.splitlines()[-1] == "1 of 1 expectations hold"
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report) >= FIELDS
    assert set(report["hit_rate"]) == {"device", "host", "storage", "total"}
    assert set(report["flush"]) == {"resident", "gone", "delivered", "pending", "divergence"}
    assert set(report["loop_lag_ms"]) == {"p50", "p99", "p999"}
    assert set(report["loop_cpu_ms"]) == {"p50", "p99", "p999"}
    assert set(report["loop_own_lag_ms"]) == (
        {"p50", "p99", "p999"} if Path(SCHEDSTAT).exists() else set()
    )


def test_a_run_and_a_replay_write_pages(kvactors, tmp_path):
    scenario, page = write(tmp_path / "s.toml", SCENARIO.format(4)), tmp_path / "r.html"
    assert kvactors("run", scenario, "--html", page)[0] == 0
    assert "Course of the run" in page.read_text()
    trace = write(
        tmp_path / "t.jsonl",
        "".join(f'{{"timestamp": {i}, "hash_ids": [{i % 3}]}}\n' for i in range(9)),
    )
    page.unlink()
    assert kvactors("replay", trace, "--html", page)[0] == 0
    assert "&quot;patience&quot;" in page.read_text()


def test_run_fails_when_an_expectation_does_not_hold(kvactors, tmp_path):
    status, out, err = kvactors("run", write(tmp_path / "s.toml", SCENARIO.format(5)))
    assert status == 1
    assert err == "not as expected: requests is 4, and 5 was expected\n"
    assert out.splitlines()[-1] == "0 of 1 expectations hold"


def test_the_hit_rate_of_a_run_is_on_one_line_of_80_columns(kvactors, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = kvactors("run", write(tmp_path / "s.toml", SCENARIO.format(4)))
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"hit rate .* \d\.\d{4}  device .* host .* storage \d\.\d{4} ", out)


def test_the_scenarios_of_the_package_are_listed(kvactors):
    status, out, _ = kvactors("run", "--list")
    assert status == 0
    for path in (ROOT / "scenarios").glob("*.toml"):
        assert path.stem in out


def test_replay_honours_its_options(kvactors, tmp_path):
    lines = [
        json.dumps({"timestamp": 1000 * i, "output_length": 1, "hash_ids": [1, i + 2]})
        for i in range(5)
    ]
    trace = write(tmp_path / "t.jsonl", "\n".join(lines))
    config = write(
        tmp_path / "c.toml",
        "[cache]\nblock_size = 8\nrecompute_last_token = false\n[layout]\nnum_layers = 1\n",
    )
    out = tmp_path / "r.json"
    assert kvactors("replay", trace, "--config", config, "--limit", 3, "--json", out)[0] == 0
    report = json.loads(out.read_text())
    assert (report["requests"], report["blocks_looked_up"], report["hit_rate"]["device"]) == (
        3,
        6,
        round(2 / 6, 6),
    )
    fast = ("replay", trace, "--config", config, "--speed", 20, "--json", out)
    assert kvactors(*fast, "--timed")[0] == 0
    report = json.loads(out.read_text())
    assert report["requests"] == 5
    assert report["wall_s"] >= 0.2  # four seconds of the trace


@pytest.mark.parametrize("arguments", [(), ("config",), ("store",)])
def test_without_a_command_the_help_is_printed(kvactors, arguments):
    status, out, errors = kvactors(*arguments)
    assert (status, errors) == (0, "")
    assert f"Usage: {' '.join(('kvactors', *arguments))} COMMAND" in out


def test_a_report_on_standard_output_is_alone_there(kvactors, tmp_path):
    path = write(tmp_path / "s.toml", SCENARIO.format(4))
    for words in (("--json", "-"), ("--json=-",)):
        status, out, err = kvactors("run", path, *words)
        assert (status, json.loads(out)["requests"]) == (0, 4)
        assert "small" in err
    for command in (("config", "check", path), ("size", path)):
        status, out, _ = kvactors(*command, "--json", "-")
        json.loads(out)
        assert status == 0


@pytest.fixture
def trace(tmp_path):
    return write(
        tmp_path / "t.jsonl",
        "".join(
            json.dumps({"timestamp": i, "hash_ids": ids}) + "\n" for i, ids in enumerate(TRACE)
        ),
    )


def test_a_sweep_writes_what_it_is_asked_for(kvactors, trace, tmp_path):
    (tmp_path / "c.toml").write_text(SWEEP)
    names = {kind: tmp_path / f"r.{kind}" for kind in ("json", "html")}
    options = [word for kind, path in names.items() for word in (f"--{kind}", path)]
    status, out, err = kvactors("sweep", trace, "--config", tmp_path / "c.toml", *options)
    assert (status, err) == (0, "")
    assert "most hits possible" in out
    report = json.loads(names["json"].read_text())
    assert report["requests"] == 3
    assert report["block_bytes"] == 32
    assert report["tiers"]["refused"] == 0
    assert names["html"].read_text().startswith("<!doctype html>")


def test_sizes_of_a_sweep_are_blocks_or_bytes(kvactors, trace, tmp_path):
    report = tmp_path / "r.json"
    for sizes in (("--device", 2, "--device", 4), ("--device", "2 KiB", "--device", "4.5k")):
        status, _, err = kvactors(
            "sweep", trace, *sizes, "--block-bytes", "1 KiB", "--json", report
        )
        assert (status, err) == (0, "")
        assert [one["blocks"] for one in json.loads(report.read_text())["points"]] == [2, 4]


def every_command(app=None, path=()):
    """The commands and their functions."""
    from cyclopts import App

    app = cli.app if app is None else app
    for name in app:
        if name.startswith("-"):
            continue
        command = app[name]
        assert isinstance(command, App)
        if command.default_command is not None:
            yield (*path, name), command.default_command
        yield from every_command(command, (*path, name))


COMMANDS = dict(every_command())


def test_every_output_of_every_command_is_checked_before_the_work():
    assert len(COMMANDS) > 10
    for path, function in COMMANDS.items():
        for name, hint in typing.get_type_hints(function, include_extras=True).items():
            if name not in ("json", "html", "trace_out"):
                continue
            (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
            checks = [one.validator for one in inner.__metadata__]
            assert (check_output,) in checks, (path, name)


def test_config_and_size(kvactors, tmp_path):
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("[cache]\nblock_size = 16\n")
    bad.write_text("[cache]\nblok_size = 16\n[device]\nkind = 'x'\n")
    status, out, _ = kvactors("config", "check", good)
    assert (status, "ok" in out, "1,024 blocks, 16,384 tokens" in out) == (0, True, True)
    status, out, _ = kvactors("config", "check", good, bad)
    assert (status, "Did you mean 'block_size'" in out, "unknown device.kind" in out) == (1, 1, 1)
    status, out, _ = kvactors("config", "show", good)
    assert (status, "block_size = 16  # file" in out) == (0, True)
    assert json.loads(kvactors("config", "schema")[1])["title"] == "Settings of kvactors"
    model = tmp_path / "config.json"
    model.write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "float16"}'
    )
    status, out, _ = kvactors(
        "size", tmp_path, "--device", "1MiB", "--host", "8 MiB", "--disk", "1g"
    )
    assert status == 0
    settings = out[out.index("[cache]") :].replace("NAME AND VERSION", "m")
    report = json.loads(
        kvactors("size", model, "--device", "1MiB", "--host", "8 MiB", "--disk", "1g", "--json=-")[
            1
        ]
    )
    found = Config.from_mapping(tomllib.loads(settings))
    layout = make_layout(found.layout, found.cache.block_size)
    assert layout.block_bytes == report["device_bytes"] == 64 * 2 * 2 * 4 * 16 * 2
    assert found.device.num_blocks == (1 << 20) // layout.block_bytes
    assert (found.host.slots + found.host.transit_slots) == (8 << 20) // layout.block_bytes
    assert found.storage.capacity_blocks == (1 << 30) // layout.block_bytes
    for options in (("--device", "1KB"), ("--host", "x"), ("--block-size", 0)):
        status, _, err = kvactors("size", model, *options)
        assert (status, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("number", "status", "interrupts"),
    [
        (signal.SIGTERM, 143, signal.SIG_DFL),
        (signal.SIGTERM, 143, signal.SIG_IGN),  # as in a background job of a shell script
        (signal.SIGINT, 130, signal.SIG_DFL),
    ],
)
def test_a_signal_leaves_no_temporary_files(tmp_path, number, status, interrupts):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    endless = write(tmp_path / "s.toml", SCENARIO.format(4).replace("turns = 2", "turns = 100000"))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvactors", "run", str(endless)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts),
    )
    try:
        ends = time.monotonic() + 120
        while not any(temporary.glob("kvactors-*")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < ends
            time.sleep(0.01)
        time.sleep(0.2)  # the run has begun
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        assert process.returncode == status, err
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()
        process.wait()


MODULE = (sys.executable, "-m", "kvactors")


def on_a_terminal(*arguments: str) -> str:
    """The standard error of a command that has a terminal there."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*MODULE, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 65536):
            shown += part
    except OSError:  # the last process has closed the terminal
        pass
    os.close(leader)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_the_share_done_and_a_pipe_shows_nothing(tmp_path):
    shown = on_a_terminal("replay", "small_chat", "--limit", "60")
    assert re.search(r"\d+ requests", shown)
    assert "100%" in shown
    shown = on_a_terminal("run", str(write(tmp_path / "s.toml", SCENARIO.format(4))))
    assert "100%" in shown


def test_colours_are_for_terminals(kvactors, tmp_path):
    good = write(tmp_path / "good.toml", "")
    assert "\x1b" not in kvactors("config", "check", good)[1]
