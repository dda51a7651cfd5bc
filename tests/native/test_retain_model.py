"""The model of RETAIN hits as often as the algorithm's research code on the same requests."""

from __future__ import annotations

import pytest

from tests.support.retain_model import RetainModel
from tests.support.traces import SHORT, read


def hit_rate(model, requests):
    """Share of all blocks that the model hits."""
    hits = blocks = 0
    for ids, now, output, partial in requests:
        blocks += len(ids)
        hits += model.request(ids, now, output, partial=partial) or 0
    return hits / blocks


@pytest.mark.parametrize(("size", "expected"), [(300, 0.0382), (1000, 0.0445)])
def test_the_hit_rate_of_the_first_requests(size, expected):
    assert hit_rate(RetainModel(size), read(SHORT, limit=800)) == pytest.approx(expected, abs=0.001)


@pytest.mark.traces
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("size", "expected"), [(1000, 0.0798), (3000, 0.1336), (10_000, 0.2331), (30_000, 0.3345)]
)
def test_the_hit_rate_of_the_conversations(traces, size, expected):
    found = hit_rate(RetainModel(size), read(traces / "mooncake_conversation.jsonl.gz"))
    assert found == pytest.approx(expected, abs=0.001)
