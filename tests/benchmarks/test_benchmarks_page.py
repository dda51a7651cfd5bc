"""The command that writes the tables of docs/benchmarks.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import runs
from tests.benchmarks.machine import describe, disk, processor, versions
from tests.benchmarks.page import filled, names_of, table
from tests.benchmarks.runs import NAMES, RUNS, Peers

ALL = Peers("/v/python", "/s/python", "/l/python")
ROWS = [
    {"case": "a | b", "ours": 2.0, "limit": 1000.5, "ratio": 0.5, "unit": "us", "limit_name": "x"},
    {"case": "c", "ours": 4.0, "limit": 2.0, "ratio": 2.0, "unit": "/s", "limit_name": "y"},
]


def record(**settings: Any) -> dict[str, Any]:
    return {
        "report": {"name": "acquire", "rows": ROWS, "settings": settings},
        "machine": describe(),
        "peers": {"vllm": "0.32"},
        "date": "2026-01-02",
        "load": 0.5,
        "seconds": 7.2,
    }


def page(*names: str) -> str:
    return "".join(f"before\n<!-- table {n} -->\nold {n}\n<!-- end {n} -->\nafter\n" for n in names)


def test_a_table_stands_between_its_markers_and_nothing_else_changes():
    text = filled(page("lag", "acquire"), {"acquire": record(rounds=9)})
    assert "old lag" in text
    assert "old acquire" not in text
    assert text.count("before\n") == text.count("after\n") == 2
    assert "| a / b | 2 | 1,000 | 0.50 | us | x |" in text, "a bar in a cell would end it"
    assert filled(text, {"acquire": record(rounds=9)}) == text, "a second time changes nothing"


def test_the_lines_below_a_table_name_losses_settings_peers_and_the_machine():
    text = table(record(rounds=9, quick=True, vllm="/v/python", spread="1 to 2", counts={"a": 1}))
    assert "1 of 2 rows are below 1." in text
    assert "A quick run, which proves nothing about speed." in text
    assert "rounds 9." in text
    assert "spread: 1 to 2." in text
    assert "/v/python" not in text
    assert "beside vllm 0.32" in text
    for part in ("processor", "cores", "memory", "kernel", "Python", "kvactors"):
        assert describe()[part] in text, part
    assert "The machine was not recorded." in table({"report": record()["report"]})


@pytest.mark.parametrize("places", [(), ("acquire", "acquire")])
def test_a_page_without_one_place_for_a_table_is_an_error(places: tuple[str, ...]):
    with pytest.raises(ValueError, match="'acquire', not one"):
        filled(page(*places), {"acquire": record()})


def test_the_page_has_a_place_for_every_run():
    assert sorted(names_of(command.PAGE.read_text())) == sorted(NAMES)


@pytest.mark.parametrize("name", ["index", "acquire", "copy", "lag", "tiers"])
def test_a_quick_run_prints_a_table_and_writes_its_report(name, tmp_path, capsys):
    assert command.main([name, "--quick", "--json", str(tmp_path / "r.json")]) == 0
    assert "ratio" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report) == {"name", "rows", "settings"}
    assert (report["name"], report["settings"]["quick"]) == (name, True)
    assert len({row["case"] for row in report["rows"]}) == len(report["rows"]) >= 6
    for row in report["rows"]:
        assert set(row) == {"case", "ours", "limit", "ratio", "unit", "limit_name"}
        assert row["ratio"] >= 0


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_every_run_is_a_command_line_that_the_command_takes(run, tmp_path):
    peers = Peers(*(str(tmp_path / name) for name in ("vllm", "sglang", "lmcache")))
    for python in peers:
        Path(python).touch()
    line = runs.command(run, peers, tmp_path / "r.json", quick=False)
    assert line[1:4] == ["-m", "tests.benchmarks", run.bench]
    options = command.parsed(line[3:])
    assert options.run.__module__ == f"tests.benchmarks.{run.bench}"
    assert set(peers.of(run).values()) == {
        value for name, value in options.taken.items() if name.endswith("python")
    }
    assert options.taken.get("blocks") == (10_000_000 if run.name == "index_large" else None)
    line = runs.command(run, peers, tmp_path / "r.json", quick=True)
    assert "--quick" in line
    assert "--blocks" not in line


def test_a_quick_run_writes_the_page_and_its_record(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text(page("acquire", "engine"))
    options = ["--quick", "--only", "acquire", "engine", "--page", str(path)]
    assert command.main([*options, "--to", str(tmp_path / "reports")]) == 0
    text = path.read_text()
    assert "| acquire to finish, one client |" in text
    assert "old engine" in text, "no interpreter with vLLM was named"
    assert "engine: not run, needs --vllm-python" in capsys.readouterr().out
    assert [one.name for one in (tmp_path / "reports").iterdir()] == ["acquire.json"]
    path.write_text(page("acquire", "engine"))
    assert command.main([*options[1:], "--from", str(tmp_path / "reports")]) == 0
    assert path.read_text() == text


def test_a_benchmark_that_fails_is_named_and_the_others_are_written(tmp_path, capsys, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(page("acquire", "lag"))

    def fake(run: Any, peers: Peers, folder: Path, *, quick: bool) -> dict[str, Any]:
        if run.name == "lag":
            raise RuntimeError("lag ended with 1: out of order")
        return record()

    monkeypatch.setattr(command, "measure", fake)
    assert command.main(["--only", "acquire", "lag", "--page", str(path)]) == 1
    assert "out of order" in capsys.readouterr().err
    assert "old lag" in path.read_text()
    assert "old acquire" not in path.read_text()


def test_bad_options_and_files_change_nothing(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text(page("lag"))
    for options in (
        ["--from", str(tmp_path / "none")],
        ["--from", str(tmp_path), "--quick"],
        ["--vllm-python", str(tmp_path / "none")],
        ["--only", "nothing"],
        ["--json", "-"],
        ["nonsense"],
        ["lag", "--blocks", "5"],
        ["lag", "--vllm-python", sys.executable],
        ["lag", "--to", str(tmp_path)],
    ):
        with pytest.raises(SystemExit):
            command.main([*options, "--page", str(path)])
    assert command.main(["--from", str(tmp_path), "--only", "acquire", "--page", str(path)]) == 2
    assert "no place for the tables acquire" in capsys.readouterr().err
    (tmp_path / "lag.json").write_text(json.dumps({"report": 5}))
    with pytest.raises(ValueError, match="no report"):
        command.main(["--from", str(tmp_path), "--only", "lag", "--page", str(path)])
    assert path.read_text() == page("lag")


def test_a_run_that_needs_more_memory_than_is_free_is_left_out(monkeypatch):
    (large,) = runs.selected(["index_large"])
    monkeypatch.setattr(runs, "free_gib", lambda: 2.0)
    assert "15 GiB" in runs.obstacle(large, ALL, quick=False)
    assert runs.obstacle(large, ALL, quick=True) == ""
    monkeypatch.setattr(runs, "free_gib", lambda: 20.0)
    assert runs.obstacle(large, ALL, quick=False) == ""
    assert runs.free_gib() == 20.0


def test_the_machine_is_described():
    info = "model name : Some CPU\nflags : fpu avx2 sha_ni\nmodel name : Other\n"
    assert processor(info) == "Some CPU (AVX2, SHA)"
    mounts = "/dev/vda / ext4 rw 0 0\n/dev/vdb /data xfs rw 0 0\ntmpfs /database tmpfs rw 0 0\n"
    assert disk(Path("/data/x"), mounts) == "xfs on vdb"
    assert disk(Path("/datax"), mounts) == "ext4 on vda"
    assert disk(Path("/data"), mounts) == "xfs on vdb"
    assert list(describe()) == [
        "processor",
        "cores",
        "memory",
        "disk",
        "kernel",
        "Python",
        "kvactors",
    ]
    assert versions("", ["numpy", "no-such-package"]).keys() == {"numpy"}
    assert versions(sys.executable, ["numpy"]) == versions("", ["numpy"])
