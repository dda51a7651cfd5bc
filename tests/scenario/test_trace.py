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
    "input_length": 9,
    "output_length": 52,
    "hash_runs": [[46, 3], [2353, 2]],
}
IDS = {
    "timestamp": 1500,
    "input_length": 9,
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
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, bad):
    path = write(tmp_path / "t.jsonl", IDS, bad)
    with pytest.raises(ConfigError, match="line 2"):
        list(read_trace(path))


@pytest.mark.parametrize(
    "bad",
    ['{"hash_ids": [-1]}', '{"hash_ids": [18446744073709551616]}', '{"hash_runs": [[5, -1]]}'],
)
def test_an_id_out_of_range_is_named(tmp_path, bad):
    path = write(tmp_path / "t.jsonl", IDS, bad)
    with pytest.raises(ConfigError, match="line 2"):
        list(read_trace(path))


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
