"""Request traces: JSON lines with block ids, plain or gzip, and the tokens those ids stand for.

Two forms of a line: Mooncake's, `{"timestamp", "input_length", "output_length", "hash_ids": [..]}`,
and one with run-length ids, `"hash_runs": [[first, count], ..]`. A line with "header" describes the
trace. Ids are chained: the same id means the same block after the same prefix.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.errors import ConfigError


class TraceRequest(NamedTuple):
    """timestamp: seconds from the trace's start. ids: one per block."""

    timestamp: float
    output_length: int
    ids: NDArray[np.uint64]


Count = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

MAX_BLOCKS = 1 << 24
"""Blocks of one request at most: more is a damaged line, and no memory is taken for it."""


class _Line(msgspec.Struct):
    timestamp: Milliseconds = 0.0
    output_length: Length = 0
    hash_ids: list[Count] | None = None
    hash_runs: list[tuple[Count, Count]] | None = None
    header: dict[str, object] | None = None


def read_trace(path: str | Path, *, coarse: int = 1, limit: int = 0) -> Iterator[TraceRequest]:
    """The requests of a trace in file order. coarse: keep every so many-th id (blocks so many times
    as large, whole ones only).

    limit: requests at most, 0 for all. ConfigError names the line that cannot be read.
    """
    check_range(coarse, limit)
    decoder, taken = msgspec.json.Decoder(_Line), 0
    for number, raw in enumerate(read_lines(path), 1):
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
            if line.header is not None:
                continue
            ids = expand(line)[coarse - 1 :: coarse]
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if not len(ids):
            continue
        yield TraceRequest(line.timestamp / 1e3, line.output_length, ids)
        taken += 1
        if taken == limit:
            return


def count_requests(path: str | Path, *, coarse: int = 1, limit: int = 0) -> int:
    """The requests that `read_trace` yields, at most `limit` unless it is 0."""
    return sum(1 for _ in read_trace(path, coarse=coarse, limit=limit))


def check_range(coarse: int, limit: int) -> None:
    """Raise ConfigError for values that `read_trace` does not take."""
    if coarse < 1:
        raise ConfigError(f"coarse must be at least 1, not {coarse}")
    if limit < 0:
        raise ConfigError(f"limit must not be negative, not {limit}")


def read_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file, plain or gzip. ConfigError if it is damaged."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            yield from file
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{path}: {error}") from error


def expand(line: _Line) -> NDArray[np.uint64]:
    """The ids of a line. ValueError or OverflowError if it has none or they are out of range."""
    if (line.hash_ids is None) == (line.hash_runs is None):
        raise ValueError("a request has either hash_ids or hash_runs")
    if line.hash_ids is not None:
        return np.array(line.hash_ids, np.uint64)
    blocks = sum(count for _, count in line.hash_runs or ())
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"hash_runs are {blocks} blocks, more than the {MAX_BLOCKS} of a request at most"
        )
    if any(first + count > 1 << 64 for first, count in line.hash_runs or ()):
        raise ValueError("hash_runs reach beyond 64 bits")
    runs = [
        np.arange(first, first + count, dtype=np.uint64) for first, count in line.hash_runs or ()
    ]
    return np.concatenate(runs) if runs else np.empty(0, np.uint64)


def tokens_of(ids: NDArray[np.uint64], block_size: int) -> NDArray[np.uint32]:
    """Tokens of blocks, uint32 [len(ids) * block_size]: a fixed, one-to-one function of each id.

    Args:
        ids: below 2**64.
        block_size: at least 2 for ids from 2**32 on.
    """
    position = np.arange(block_size, dtype=np.uint32) * np.uint32(2654435761)
    tokens = (
        ids.astype(np.uint32)[:, None] ^ position[None, :]
    )  # position 0 carries the id's low half
    if block_size > 1:
        tokens[:, 1] = (ids >> np.uint64(32)).astype(np.uint32)
    return tokens.reshape(-1)
