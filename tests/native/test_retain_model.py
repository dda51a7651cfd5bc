"""The model of RETAIN hits as often as the algorithm's research code on the same requests."""

from __future__ import annotations

import pytest

from tests.support.retain_model import BINS, EDGES, LifeTable, RetainModel
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


def test_a_density_before_anything_is_known_falls_with_the_age():
    table = LifeTable()
    densities = [table.density((0, 0, 0), j) for j in range(BINS)]
    assert densities == sorted(densities, reverse=True)


def test_the_density_looks_ahead_to_the_age_at_which_runs_return():
    # All runs of a class return at about 60 s. The best moment to give up is behind that, so a run
    # is worth more the nearer it is, and nothing once it has passed.
    table, cls = LifeTable(), (0, 0, 0)
    hump = next(j for j in range(BINS) if EDGES[j + 1] > 60)
    for _ in range(1000):
        for j in range(hump + 1):
            table.count_reached(cls, j)
        table.count_returned(cls, hump)
    table.refresh()
    before = [table.density(cls, j) for j in range(hump + 1)]
    assert before == sorted(before)
    assert before[-1] > 20 * table.density(cls, hump + 1)


def test_a_request_larger_than_the_cache_changes_nothing():
    model = RetainModel(2)
    model.request([0, 1], 0.0)
    assert model.request([0, 1, 2], 1.0) is None
    assert model.resident == {0, 1}
    assert not model.evicted


def test_ghost_entries_are_bounded_and_the_oldest_is_forgotten():
    model = RetainModel(1, most_ghosts=2)
    for block in range(5):
        model.request([block], float(block))
    assert [run.blocks for run in model.ghosts.values()] == [[2], [3]]
    assert set(model.uses) == {2, 3, 4}


def test_one_shot_prompts_do_not_displace_prompts_that_return():
    # A cycle slightly larger than the cache: LRU never hits.
    model = RetainModel(90)
    cycle = [list(range(10 * number, 10 * number + 10)) for number in range(10)]
    assert hit_rate(model, [(cycle[i % 10], i * 0.5, 100, False) for i in range(3000)]) > 0.8
