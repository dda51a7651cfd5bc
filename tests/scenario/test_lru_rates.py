"""A replay under RETAIN reports the hits that LRU tiers of the same sizes have."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvactors.scenario.replay import ReplayConfig, replay
from kvactors.scenario.report import print_summary

TRACE = [[0, 1, 2], [0, 1, 3, 4], [5], [0, 1, 2, 6, 7, 8], [0, 1, 3, 4], [5, 9], [0, 1, 2, 6]] * 3


def config_of(policy, **tables):
    return ReplayConfig.from_mapping(
        {
            "cache": {"block_size": 4, "model": "m", "recompute_last_token": False},
            "device": {"num_blocks": 6, "policy": policy},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": "uint8"},
            **tables,
        }
    )


def written(path, requests):
    lines = [{"timestamp": 1000 * i, "hash_ids": ids} for i, ids in enumerate(requests)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


HOST = {"host": {"slots": 3, "transit_slots": 8}}
STORE = {"storage": {"backend": "memory", "write_policy": "write_back"}}


@pytest.mark.parametrize("tables", [{}, HOST, HOST | STORE])
async def test_they_are_those_of_an_lru_replay(tmp_path, tables):
    trace = written(tmp_path / "trace.jsonl", TRACE)
    lru = await replay(trace, config_of("lru", **tables))
    assert lru.hit_rate_lru == {}
    retain = await replay(trace, config_of("retain", **tables))
    assert retain.hit_rate_lru == lru.hit_rate
    out = Console(file=io.StringIO(), width=120)
    print_summary(retain, out, "")
    assert f"device {lru.hit_rate['device']:.4f}" in out.file.getvalue().split("of LRU")[1]


async def test_a_trace_whose_ids_are_not_chained_has_none(tmp_path):
    trace = written(tmp_path / "trace.jsonl", [[0, 1], [2, 1]])
    report = await replay(trace, config_of("retain"))
    assert (report.requests, report.hit_rate_lru) == (2, {})
