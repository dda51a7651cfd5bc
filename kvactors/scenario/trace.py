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
    """A request of a trace. input_length: tokens of the prompt, 0 if the trace lacks it or blocks
    are coarse."""

    timestamp: float
    output_length: int
    ids: NDArray[np.uint64]
    input_length: int = 0


Count = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

MAX_BLOCKS = 1 << 24
"""Blocks of one request at most: more is a damaged line, and no memory is taken for it."""

MAX_LINE = 64 << 20
"""Bytes of a line at most, also of one that is packed."""


class _Header(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Line(msgspec.Struct):
    timestamp: Milliseconds | None = None
    input_length: Length | None = None
    output_length: Length = 0
    hash_ids: list[Count] | None = None
    hash_runs: list[tuple[Count, Count]] | None = None
    header: _Header | None = None


class _LineChecks:
    """Checks of the lines of one trace against each other: the order of times, and a block size.

    A prompt of `input_length` tokens has one id for each whole block, or another one for the rest.
    Without a header the block size is unknown, and every line narrows the range of possible ones.
    """

    def __init__(self) -> None:
        self._timestamp = 0.0
        self.least, self.most = 1, 1 << 32  # tokens of a block

    def timestamp(self, line: _Line) -> float:
        """Milliseconds of a request. One without a time arrives with the request before it.
        ValueError for a time that goes back."""
        now = self._timestamp if line.timestamp is None else line.timestamp
        if now < self._timestamp:
            raise ValueError(
                f"timestamp {now:g} is before {self._timestamp:g}, that of the request above: sort "
                "the requests by timestamp"
            )
        self._timestamp = now
        return now

    def length(self, tokens: int, blocks: int) -> None:
        """ValueError for a prompt of `tokens` that does not have so many blocks."""
        least = max(self.least, tokens // (blocks + 1) + 1)
        most = self.most
        if blocks > 1:
            most = min(most, (tokens - 1) // (blocks - 1))
        if least > most or (blocks and not tokens):
            known = f"{self.least}" + f" to {self.most}" * (self.most > self.least)
            raise ValueError(
                f"input_length {tokens} does not match {blocks} ids of blocks of {known} tokens, "
                "the size in the lines above"
            )
        self.least, self.most = least, most


def read_trace(path: str | Path, *, coarse: int = 1, limit: int = 0) -> Iterator[TraceRequest]:
    """The requests of a trace in file order. coarse: keep every so many-th id (blocks so many times
    as large, whole ones only). Raises ConfigError: names the line that cannot be read or
    contradicts those above, or the file that has no requests."""
    if coarse < 1:
        raise ConfigError(f"coarse must be at least 1, not {coarse}")
    if limit < 0:
        raise ConfigError(f"limit must not be negative, not {limit}")
    decoder, checks, taken = msgspec.json.Decoder(_Line), _LineChecks(), 0
    for number, raw in enumerate(read_lines(path), 1):
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
            if line.header is not None:
                if (size := line.header.block_size) is not None:
                    checks.least = checks.most = size
                continue
            ids, timestamp = expand(line), checks.timestamp(line)
            if line.input_length is not None:
                checks.length(line.input_length, len(ids))
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        ids = ids[coarse - 1 :: coarse]
        if not len(ids):
            continue
        tokens = line.input_length or 0
        yield TraceRequest(timestamp / 1e3, line.output_length, ids, tokens if coarse == 1 else 0)
        taken += 1
        if taken == limit:
            return
    if not taken:
        blocks = "block" if coarse == 1 else f"block of {coarse} ids (coarse)"
        raise ConfigError(f"{path}: the trace has no request with a whole {blocks}")


def read_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file, plain or gzip. ConfigError if it is damaged, or a line too long."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise ConfigError(f"{path}: a line has more than {MAX_LINE >> 20} MiB")
                yield line
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{path}: {error}") from error


def expand(line: _Line) -> NDArray[np.uint64]:
    """The ids of a line. ValueError or OverflowError if it has none or they are out of range."""
    if (line.hash_ids is None) == (line.hash_runs is None):
        raise ValueError("a request has either hash_ids or hash_runs")
    if line.hash_ids is not None:
        return np.array(line.hash_ids, np.uint64)
    runs = line.hash_runs or []
    blocks = sum(count for _, count in runs)
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"hash_runs are {blocks} blocks, more than the {MAX_BLOCKS} of a request at most"
        )
    if any(first + count > 1 << 64 for first, count in runs):
        raise ValueError("hash_runs reach beyond 64 bits")
    ids = (np.arange(first, first + count, dtype=np.uint64) for first, count in runs)
    return np.concatenate([np.empty(0, np.uint64), *ids])


def tokens_of(ids: NDArray[np.uint64], block_size: int) -> NDArray[np.uint32]:
    """Tokens of blocks, uint32 [len(ids) * block_size]: a fixed, one-to-one function of each id.
    block_size: at least 2 for ids from 2**32 on."""
    position = np.arange(block_size, dtype=np.uint32) * np.uint32(2654435761)
    # position 0 carries the id's low half
    tokens = ids.astype(np.uint32)[:, None] ^ position[None, :]
    if block_size > 1:
        tokens[:, 1] = (ids >> np.uint64(32)).astype(np.uint32)
    return tokens.reshape(-1)
