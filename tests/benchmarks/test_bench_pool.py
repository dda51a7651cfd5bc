"""Rows of a Mooncake pool beside its raw client in the benchmark `store`."""

from __future__ import annotations

import pytest

from kvactors.signals import run_terminable
from kvactors.storage.mooncake_client import MooncakeClient
from tests.benchmarks.store_pool import NAMES, Runner, in_pool, rows_beside, spread_beside
from tests.storage.mooncake_standin import StandIn

RATES = {
    Runner.OURS: [4e9, 6e9, 5e9],
    Runner.RAW: [5e9, 8e9, 4e9],
    Runner.OURS_CHECKED: [3e9, 1e9, 2e9],
    Runner.RAW_CHECKED: [4e9, 4e9, 1e9],
}
FOUND = {("read", one): [(rate, 0.1 * one) for rate in of] for one, of in RATES.items()}


def test_like_is_beside_like_and_checksums_are_beside_none_in_another_row():
    rows = {row.case: row for row in rows_beside("case, read", FOUND, "read")}
    assert {name: (row.ours, row.limit, row.limit_name) for name, row in rows.items()} == {
        "case, read, no checksums": (5000, 5000, "the raw client"),
        "case, read, checksums": (2000, 4000, "the raw client, checksums by its caller"),
        "case, read, checksums beside none": (2000, 5000, "the raw client"),
    }
    assert [row.ratio for row in rows.values()] == [1.0, 0.5, 0.4]


def test_the_spread_has_ratios_of_the_same_rounds_and_processor_time():
    shown = spread_beside(FOUND, "read")
    assert shown.startswith("no checksums 0.75 to 1.25 (0.80), checksums 0.25 to 2.00 (0.75), ")
    for one, name in NAMES.items():
        assert f"{name} {0.1 * one:.2f}" in shown


def test_every_runner_moves_its_own_kind_of_objects(monkeypatch):
    """Of a pool in the place of Mooncake's: each runner writes and reads all objects in each round,
    with a header or without, and leaves none."""
    pool, sizes = StandIn(), []
    put = pool.batch_put_from_multi_buffers

    def watched(keys, pointers, lengths):
        codes = put(keys, pointers, lengths)
        sizes.append({(len(pool.objects[one]), pool.objects[one][4096 + 12 :][:1]) for one in keys})
        return codes

    monkeypatch.setattr(pool, "batch_put_from_multi_buffers", watched)
    monkeypatch.setattr(MooncakeClient, "_make", staticmethod(lambda: pool))

    async def answers(*_):
        return True

    monkeypatch.setattr("kvactors.storage.mooncake_client.any_answers", answers)
    found = run_terminable(in_pool("127.0.0.1:1", 4096, 8 * 4096, 1))
    assert {key: len(of) for key, of in found.items()} == {
        (what, one): 1 for what in ("write", "read") for one in Runner
    }
    bare, checked, raw = {(4192, b"\1")}, {(4192, b"\0")}, {(4096, b"")}
    assert sizes == [bare, raw, checked, checked, raw, checked, checked, bare]
    assert pool.objects == {}


@pytest.mark.parametrize("lost", ["batch_put_from_multi_buffers", "batch_get_into_multi_buffers"])
def test_lost_objects_give_no_figures(monkeypatch, lost):
    pool = StandIn()
    monkeypatch.setattr(pool, lost, lambda keys, *_: [-800] * len(keys))
    monkeypatch.setattr(MooncakeClient, "_make", staticmethod(lambda: pool))

    async def answers(*_):
        return True

    monkeypatch.setattr("kvactors.storage.mooncake_client.any_answers", answers)
    with pytest.raises(RuntimeError, match="an object was lost"):
        run_terminable(in_pool("127.0.0.1:1", 4096, 8 * 4096, 1))
