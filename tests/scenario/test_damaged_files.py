"""Files from outside with random damage: each reader raises its named error or reads the intact
part. Nothing hangs or raises anything else."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import tomllib
from contextlib import suppress
from threading import Timer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.errors import ConfigError, SinkError
from kvactors.flush_notifier.sinks.attention_store import Journal, PublishedBlocks, line_of
from kvactors.scenario import trace
from kvactors.scenario.replay import ReplayConfig
from kvactors.scenario.trace import MAX_BLOCKS, read_lines, read_trace

BLOCK = 2
NESTED = "[" * 200_000
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from([1 << 32, 1 << 64, 10**30, 1e308, -1.5])
    | st.sampled_from(
        ["", "-", "+", "+own", "ab", "00" * 32, "11" * 32, "22" * 32, "zz" * 32, "é"]
    ),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["hash_ids", "timestamp", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def name(number: int) -> bytes:
    return bytes([number]) * 32


def journal_lines() -> bytes:
    def tokens(*ids: int) -> bytes:
        return b"".join(one.to_bytes(4, "little") for one in ids)

    lines = [
        line_of(0, name(0), [name(1), name(2)], tokens(1, 2, 3, 4)),
        line_of(2, name(2), [name(3)], tokens(5, 6), whole=False),
        json.dumps(["-", [name(2).hex()]]).encode(),
        line_of(1, name(9), [name(4)], tokens(1, 2, 7, 8)),
    ]
    return b"".join(line + b"\n" for line in lines)


TRACE = b'{"header": {"a": 1}}\n{"timestamp": 5, "output_length": 3, "hash_ids": [1, 2]}\n{"hash_runs": [[0, 3], [9, 1]]}\n'


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """Bytes that are changed, cut out, repeated, or followed by another JSON value."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "cut", "insert", "line"])):
            case "change" if at < len(data):
                data[at] = draw(st.sampled_from(b'0123456789abcdef"-+[]{},.eE\n\r \x00\xff'))
            case "cut":
                del data[at : at + draw(st.integers(0, 40))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=6) | st.just(whole[:50]))
            case _:
                line = json.dumps(draw(JSON)).encode() + b"\n"
                start = data.rfind(b"\n", 0, at) + 1
                data[start:start] = line
    return bytes(data)


def read_journal(path, data: bytes) -> PublishedBlocks | None:
    """The journal's contents; None if it was refused."""
    path.write_bytes(data)
    published = PublishedBlocks(BLOCK)
    with suppress(SinkError):
        asyncio.run(Journal(str(path), published).read())
        return published
    return None


@given(data=damaged(journal_lines()))
@settings(max_examples=150, deadline=None)
def test_a_damaged_journal_is_refused_or_describes_whole_paths(tmp_path_factory, data):
    published = read_journal(tmp_path_factory.mktemp("journal") / "journal", data)
    if published is not None:
        for hashes, start, tokens in published.retractions():
            assert len(tokens) == (start + len(hashes)) * 4 * BLOCK
            assert all(len(one) == 32 for one in hashes)


H = [name(number).hex() for number in range(4)]


@pytest.mark.parametrize(
    "line",
    [
        NESTED,
        json.dumps(["+", 0, H[0], [H[1]], [1, 1 << 32]]),
        json.dumps(["+", 0, H[0], [H[1]], [1, -1]]),
        json.dumps(["+", 0, H[0], [H[1]], [1, 2.5]]),
        json.dumps(["+", 10**30, H[0], [H[1]], [1, 2]]),
        json.dumps(["+", -1, H[0], [H[1]], []]),
        json.dumps(["+", 0, H[0], [H[1]], [1, 2, 3]]),
        json.dumps(["+", 0, H[0], ["ab"], [1, 2]]),
        json.dumps(["+", 0, H[0], [H[1], H[1]], [1, 2, 3, 4]]),
        json.dumps(["+own", 1, H[3], [H[1]], [1, 2]]),
        json.dumps(["-", "ab"]),
        json.dumps("-"),
    ],
    ids=range(12),
)
def test_a_journal_line_that_cannot_be_is_named(tmp_path, line):
    assert read_journal(tmp_path / "journal", line.encode() + b"\n") is None


def test_a_journal_line_that_contradicts_an_earlier_one_is_named(tmp_path):
    whole = journal_lines()
    assert read_journal(tmp_path / "journal", whole) is not None
    for line in (["+own", 7, H[2], [name(8).hex()], [1, 2]], ["+", 0, H[0], [H[3]], [1, 2]]):
        assert read_journal(tmp_path / "journal", whole + json.dumps(line).encode() + b"\n") is None


@given(data=damaged(TRACE), zipped=st.booleans(), cut=st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_a_damaged_trace_is_named_or_read(tmp_path_factory, data, zipped, cut):
    path = tmp_path_factory.mktemp("trace") / ("t.jsonl.gz" if zipped else "t.jsonl")
    packed = gzip.compress(data) if zipped else data
    path.write_bytes(packed[: len(packed) - cut])
    with suppress(ConfigError):
        for request in read_trace(path):
            assert 0 <= request.timestamp <= 1e12
            assert 0 < len(request.ids) <= MAX_BLOCKS


@pytest.mark.parametrize(
    "line",
    [
        '{"hash_ids": ' + NESTED,
        '{"header": {"x": ' + NESTED,
        '{"hash_runs": [[0, 1000000000000000]]}',
        '{"hash_runs": [[18446744073709551615, 2]]}',
        '{"timestamp": 1e308, "hash_ids": [1]}',
        '{"timestamp": -1, "hash_ids": [1]}',
        '{"output_length": 100000000000, "hash_ids": [1]}',
    ],
    ids=range(7),
)
def test_a_trace_line_that_cannot_be_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        list(read_trace(path))


REPLAY = b'[cache]\nmodel = "m"\nblock_size = 4\n[replay]\nmode = "timed"\nspeed = 2.0\ncoarse = 2\nlimit = 3\n'


@given(data=damaged(REPLAY))
@settings(max_examples=150, deadline=None)
def test_a_damaged_replay_config_is_named_or_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("config") / "c.toml"
    path.write_bytes(data)
    with suppress(ConfigError):
        ReplayConfig.from_toml(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("speed", "patience") for value in ("inf", "nan", "0", "-1")]
    + [("coarse", "0"), ("limit", "-1"), ("step_tokens", "0"), ("most_running", "0")],
)
def test_replay_settings_that_cannot_be_are_named(key, value):
    with pytest.raises(ConfigError, match=key):
        ReplayConfig.from_mapping(tomllib.loads(f"[replay]\n{key} = {value}"))


def test_a_trace_with_a_line_too_long_is_named(tmp_path, monkeypatch):
    """A packed file of 2 MB may have a line of 2 GB: it is never in memory as a whole."""
    path = tmp_path / "t.jsonl.gz"
    monkeypatch.setattr(trace, "MAX_LINE", 30)
    path.write_bytes(gzip.compress(b'{"hash_ids": [1], "header": null}'[:29] + b"\n" + b" " * 31))
    lines = read_lines(path)
    assert len(next(lines)) == 30
    with pytest.raises(ConfigError, match=r"t\.jsonl\.gz: a line has more than"):
        next(lines)


def test_settings_in_a_file_without_end_are_refused():
    with pytest.raises(ConfigError, match="/dev/zero has more than 16 MiB"):
        ReplayConfig.from_toml("/dev/zero")


def test_settings_in_a_pipe_are_read_if_a_process_writes_them(tmp_path):
    path = tmp_path / "c.toml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"c\.toml is a pipe that no process writes"):
        ReplayConfig.from_toml(path)
    ends = os.pipe()
    Timer(0.2, lambda: (os.write(ends[1], b"[cache]\nmodel = 'm'"), os.close(ends[1]))).start()
    assert ReplayConfig.from_toml(f"/dev/fd/{ends[0]}").cache.model == "m"
    os.close(ends[0])


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\xff", "invalid start byte"),
        (b"x = " + NESTED.encode(), "more than 32 tables or lists inside one another$"),
        (b"x = " + b"9" * 5000, "a whole number has too many digits$"),
        (b"[" + b".".join([b"a"] * 20_000) + b"]", "more than 32 tables or lists"),
        (b"x = " + b"[" * 40 + b"]" * 40, "more than 32 tables or lists"),
    ],
    ids=["not UTF-8", "nested", "a number of 5,000 digits", "deep", "lists"],
)
def test_a_config_that_is_no_toml_is_named(tmp_path, data, complaint):
    path = tmp_path / "c.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"c\.toml: .*{complaint}"):
        ReplayConfig.from_toml(path)
