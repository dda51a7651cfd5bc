"""Reading traces, and the tokens their ids stand for."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.errors import ConfigError
from kvactors.scenario.trace import read_trace, tokens_of

HEADER = {"header": {"name": "t", "block_size": 512}}
RUNS = {
    "timestamp": 1500,
    "input_length": 2100,
    "output_length": 52,
    "hash_runs": [[46, 3], [2353, 2]],
}
IDS = {
    "timestamp": 1500,
    "input_length": 2100,
    "output_length": 52,
    "hash_ids": [46, 47, 48, 2353, 2354],
}


def write(path, *lines, compress=False):
    data = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("lines", [[HEADER, RUNS], [IDS], [IDS, ""]])
def test_both_forms_plain_or_gzip_with_or_without_header(tmp_path, lines, compress):
    path = write(tmp_path / ("t.jsonl.gz" if compress else "t.jsonl"), *lines, compress=compress)
    [request] = read_trace(path)
    assert request.ids.tolist() == IDS["hash_ids"]
    assert (request.timestamp, request.output_length) == (1.5, 52)


def test_coarse_keeps_every_nth_id_and_drops_requests_without_a_whole_block(tmp_path):
    short = {"hash_ids": [1, 2]}
    path = write(tmp_path / "t.jsonl", IDS, short)
    assert [request.ids.tolist() for request in read_trace(path, coarse=2)] == [[47, 2353], [2]]
    assert [request.ids.tolist() for request in read_trace(path, coarse=3)] == [[48]]


def test_limit_counts_requests(tmp_path):
    path = write(tmp_path / "t.jsonl", HEADER, *[IDS] * 5)
    assert len(list(read_trace(path, limit=3))) == 3
    assert len(list(read_trace(path))) == 5


@pytest.mark.parametrize(
    "bad",
    [
        "{not json",
        '{"hash_ids": ["x"]}',
        '{"timestamp": 1}',
        '{"hash_ids": [1], "hash_runs": [[1, 1]]}',
        '{"hash_runs": [[1]]}',
        '{"hash_ids": [-1]}',
        '{"hash_ids": [18446744073709551616]}',
        '{"hash_runs": [[5, -1]]}',
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, bad):
    path = write(tmp_path / "t.jsonl", IDS, bad)
    with pytest.raises(ConfigError, match="line 2"):
        list(read_trace(path))


def length(tokens, blocks, at=0):
    return {"timestamp": at, "input_length": tokens, "hash_ids": list(range(blocks))}


@pytest.mark.parametrize(
    "lines",
    [
        [HEADER, length(511, 0), length(512, 1), length(1023, 1), length(1023, 2)],
        [length(100, 6), length(96, 6), length(95, 6), length(7, 0), length(7, 1)],
        [length(1, 1), length(1 << 31, 1)],
    ],
    ids=["a header", "whole blocks and rests", "one block each"],
)
def test_prompts_of_one_block_size_with_and_without_their_last_block(tmp_path, lines):
    wanted = [line["input_length"] for line in lines if line.get("hash_ids")]
    path = write(tmp_path / "t.jsonl", *lines)
    assert [request.input_length for request in read_trace(path)] == wanted


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (
            [HEADER, length(1023, 3)],
            "line 2: input_length 1023 does not match 3 ids of blocks of 5",
        ),
        ([HEADER, length(1025, 1)], "line 2: input_length 1025 does not match 1 ids"),
        ([length(0, 1)], "line 1: input_length 0 does not match 1 ids"),
        ([length(1600, 100), length(1600, 10)], "line 2: .* blocks of 16 tokens"),
        ([length(160, 10), length(1600, 10)], "line 2: .* blocks of 15 to 17 tokens"),
        ([length(16, 1, 5), length(16, 1, 5), length(16, 1, 4)], "line 3: timestamp 4 is before 5"),
        ([], "the trace has no request with a whole block$"),
        ([HEADER, length(7, 0)], "the trace has no request with a whole block$"),
    ],
    ids=range(8),
)
def test_lines_that_contradict_each_other_are_named(tmp_path, lines, error):
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(ConfigError, match=error):
        list(read_trace(path))


def test_a_trace_without_a_coarse_block_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no request with a whole block of 9 ids"):
        list(read_trace(write(tmp_path / "t.jsonl", IDS), coarse=9))


def test_a_request_without_a_time_arrives_with_the_one_before(tmp_path):
    path = write(tmp_path / "t.jsonl", IDS, {"hash_ids": [1]})
    assert [request.timestamp for request in read_trace(path)] == [1.5, 1.5]


def test_a_file_that_is_no_gzip_is_a_config_error(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(b"plainly not")
    with pytest.raises(ConfigError, match=r"t\.jsonl\.gz"):
        list(read_trace(path))


@given(
    ids=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20, unique=True),
    block_size=st.sampled_from([2, 4, 16, 512]),
)
def test_tokens_are_one_to_one_and_chunk_by_chunk(ids, block_size):
    array = np.array(ids, np.uint64)
    tokens = tokens_of(array, block_size)
    assert tokens.dtype == np.uint32
    blocks = tokens.reshape(len(ids), block_size)
    assert len({block.tobytes() for block in blocks}) == len(ids)
    assert np.array_equal(tokens_of(array[-1:], block_size), blocks[-1])
