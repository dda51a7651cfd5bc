"""The frame of the benchmarks: the command, the page, the machine, and every benchmark in a quick
run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvactors.errors import ConfigError
from tests.benchmarks import __main__ as command
from tests.benchmarks import frame
from tests.benchmarks.frame import (
    PEERS,
    Report,
    disk,
    machine,
    origin,
    processor,
    put_table,
    rate_row,
    table,
    time_row,
    versions,
)

ROWS = [
    rate_row("a | b", 1000.5, 2001.0, "/s", "x"),
    time_row("c", 2.0, 4.0, "us", "y"),
    time_row("c, beside x", 2.0, 3.0, "us", "x"),
    time_row("d", 2.0, 8.0, "us", "x"),
]


def page(*names: str) -> str:
    return "".join(f"before\n<!-- table {n} -->\nold {n}\n<!-- end {n} -->\nafter\n" for n in names)


def test_a_higher_ratio_is_better_in_every_kind_of_row():
    assert [row.ratio for row in ROWS] == [0.5, 2.0, 1.5, 4.0]


def test_a_table_stands_between_its_markers_and_nothing_else_changes():
    new = table(Report(ROWS, {"rounds": 9, "quick": True}), origin({}, 0.5))
    text = put_table(page("lag", "acquire"), "acquire", new)
    assert "old lag" in text
    assert "old acquire" not in text
    assert text.count("before\n") == text.count("after\n") == 2
    assert "| case | ours (us) | ratio: x |" in text
    assert "| a / b | 1,000 /s | 0.50: 2,001 |" in text, "a bar in a cell would end it"
    assert "| c | 2 | 2.00: 4 y; 1.50: 3 |\n| d | 2 | 4.00: 8 |" in text
    assert "A quick run, which proves nothing.\n\nrounds 9.\n" in text
    assert all(part in text for part in machine().values())
    assert put_table(text, "acquire", new) == text, "a second time changes nothing"


@pytest.mark.parametrize("places", [(), ("acquire", "acquire")])
def test_a_page_without_one_place_for_a_table_is_an_error(places: tuple[str, ...]):
    with pytest.raises(ConfigError, match="'acquire', not one"):
        put_table(page(*places), "acquire", "")


def test_the_page_has_a_place_for_every_benchmark():
    found = [one[1] for one in frame.MARK.finditer(frame.PAGE.read_text())]
    assert found == list(PEERS)


@pytest.mark.ci
@pytest.mark.parametrize("name", [name for name in PEERS if name not in ("engine", "flush")])
def test_a_quick_run_prints_a_table_and_writes_its_report(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main([name, "--quick", "--json", str(tmp_path / "r.json")]) == 0
    assert "ratio" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["quick"] is True
    assert len({row["case"] for row in report["rows"]}) == len(report["rows"]) >= 3
    assert all(row["ours"] > 0 < row["limit"] for row in report["rows"])
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"], "nothing else is left"


@pytest.mark.full
@pytest.mark.ci
def test_several_run_in_turn_and_one_that_fails_stops_none(tmp_path, capfd):
    path = tmp_path / "page.md"
    path.write_text(page("flush", "lag"))
    options = ["--quick", "--write", "--page", str(path)]
    assert command.main(["engine", "flush", *options]) == 1
    text = path.read_text()
    assert "| change to sink, 10,000 a second, p99 |" in text
    assert "old lag" in text
    assert "engine: the page has 0 places" in capfd.readouterr().err


def test_bad_options_are_named(tmp_path, capsys):
    for options in (["nonsense"], ["lag", "--vllm-python", str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            command.main(options)
    assert command.main(["lag", "acquire", "--json", "-"]) == 2
    assert "for one benchmark" in capsys.readouterr().err


def test_the_machine_is_described():
    info = "model name : Some CPU\nflags : fpu avx2 sha_ni\nmodel name : Other\n"
    assert processor(info) == "Some CPU (AVX2, SHA)"
    mounts = "/dev/vda / ext4 rw 0 0\n/dev/vdb /data xfs rw 0 0\ntmpfs /database tmpfs rw 0 0\n"
    places = {"/data/x": "xfs on vdb", "/datax": "ext4 on vda", "/data": "xfs on vdb"}
    assert {place: disk(Path(place), mounts) for place in places} == places
    assert versions(["numpy", "no-such-package"]).keys() == {"numpy"}
    python = str(Path(sys.prefix, "bin", "python3"))
    assert versions(["numpy", "no-such-package"], python) == versions(["numpy"])
