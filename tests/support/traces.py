"""Traces of the tests, and whole ones where they are given (`--traces DIR`)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SHORT = Path(__file__).parents[1] / "traces" / "conversation_2000.jsonl.gz"


class Request(NamedTuple):
    """One request.

    Attributes:
        ids: its blocks.
        now: seconds.
        output: tokens that it produces.
    """

    ids: Sequence[int]
    now: float
    output: int = 100


def read(path: Path, *, shard: int = 0, shards: int = 1, limit: int = 0) -> Iterator[Request]:
    """The requests of a trace.

    Args:
        path: JSON lines, gzip.
        shard, shards: of every `shards` ids keep the one at this position. The last position makes
            blocks so many times as large, whole ones only.
        limit: requests at most, 0 for all.
    """
    taken = 0
    with gzip.open(path, "rb") as file:
        for raw in file:
            line = json.loads(raw)
            if "header" in line:
                continue
            ids = [one for first, many in line["hash_runs"] for one in range(first, first + many)]
            if ids := ids[shard::shards]:
                yield Request(ids, line["timestamp"] / 1e3, line["output_length"])
                taken += 1
                if taken == limit:
                    return
