"""Standard streams and outputs of a command: closed, full, without a reader, in any locale, and
files that are two things at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from kvactors.scenario.output import check_distinct, print_fields, print_rows
from tests.cli.test_command_line import TRACE

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "größe [red].jsonl"
    path.write_text(
        "".join(json.dumps({"timestamp": i, "hash_ids": ids}) + "\n" for i, ids in enumerate(TRACE))
    )
    return path


def shell(line, *arguments, environment=None):
    """A shell's line in which "$@" is kvactors with some arguments."""
    return subprocess.run(
        ["bash", "-c", line, "-", sys.executable, "-m", "kvactors", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "", **(environment or {})},
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("arguments", [("sweep",), ("--help",), ("config", "schema")])
def test_a_reader_that_has_gone_ends_a_command_in_silence(arguments, trace):
    if arguments == ("sweep",):
        arguments = ("sweep", trace)
    done = shell('set -o pipefail; "$@" | sleep 0', *arguments)
    # `sleep` closes the pipe before the first byte, as Python takes longer to start
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_streams_get_nothing_and_the_error_goes_to_no_other_stream(trace, tmp_path):
    assert shell('"$@" >&-', "sweep", trace).returncode == 0
    done = shell('"$@" 2>&-', "sweep", tmp_path / "none")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_full_standard_output_is_named(trace):
    done = shell('"$@" >/dev/full', "config", "show")
    assert done.returncode == 2
    assert done.stderr == "kvactors: [Errno 28] No space left on device\n"


def test_a_locale_without_the_characters_of_a_name_gets_escapes_and_json_is_utf_8(trace):
    done = shell('"$@"', "sweep", trace, "--json", "-", environment=ASCII)
    assert done.returncode == 0
    assert "gr\\xf6\\xdfe [red].jsonl" in done.stderr
    assert json.loads(done.stdout)["trace"] == trace.name


def test_a_name_that_is_not_utf_8_is_replaced_in_json_and_on_a_page(kvactors, trace):
    name = os.fsdecode(os.fsencode(trace) + b"\xff")
    trace.rename(name)
    page = trace.with_name("page.html")
    status, _, _ = kvactors("sweep", name, "--html", page, "--json", trace.with_name("r.json"))
    assert status == 0
    assert json.loads(trace.with_name("r.json").read_bytes())["trace"].endswith("jsonl\ufffd")
    assert "jsonl\ufffd" in page.read_text("utf-8")


def test_an_error_names_the_file_that_cannot_be_written(kvactors, trace):
    for option in ("--json", "--html"):
        status, _, err = kvactors("sweep", trace, option, "/dev/full")
        assert (status, err) == (2, "kvactors: /dev/full: No space left on device\n")


def test_names_with_brackets_are_no_markup(kvactors, trace):
    status, out, err = kvactors("sweep", trace)
    assert (status, err) == (0, "")
    assert "größe [red].jsonl" in out
    console = Console(file=StringIO(), width=80)
    print_fields("[/a]", [("[b]", "[/c]")], console)
    print_rows("[/d]", ["e"], [["[/f]"]], console, numbers=range(0), styles={0: "red"})
    text = console.file.getvalue()
    assert all(one in text for one in ("[/a]", "[b]", "[/c]", "[/d]", "[/f]"))


def test_no_line_breaks_between_a_number_and_its_name():
    pairs = [f"count {number}" for number in range(40)]
    for width in (30, 47, 80):
        console = Console(file=StringIO(), width=width)
        print_fields("", [("counts", "  ".join(pairs))], console)
        text = console.file.getvalue()
        assert all(f"{pair} " in text for pair in pairs), width


def test_no_output_is_an_input_or_another_output(kvactors, trace, tmp_path):
    before = trace.read_bytes()
    other = tmp_path / "x" / ".." / trace.name
    (tmp_path / "x").mkdir()
    (tmp_path / "s.toml").write_text("")
    link = tmp_path / "link"
    link.symlink_to(trace)
    for arguments in (
        ("sweep", trace, "--json", trace),
        ("sweep", trace, "--json", other),
        ("sweep", trace, "--html", link),
        ("replay", trace, "--html", trace),
        ("replay", trace, "--trace-out", trace),
        ("sweep", trace, "--json", tmp_path / "r", "--html", tmp_path / "r"),
        ("run", tmp_path / "s.toml", "--trace", tmp_path / "s.toml"),
        ("size", tmp_path / "s.toml", "--json", tmp_path / "s.toml"),
        ("config", "check", tmp_path / "s.toml", "--json", tmp_path / "s.toml"),
        ("config", "show", tmp_path / "s.toml", "--json", tmp_path / "s.toml"),
    ):
        status, out, err = kvactors(*arguments)
        assert (status, out) == (2, ""), arguments
        assert "would overwrite" in err
    assert trace.read_bytes() == before
    assert not (tmp_path / "r").exists()
    check_distinct((trace,), json=tmp_path / "a", html=None)
