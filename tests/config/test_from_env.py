"""FastDeploy's variables, and the settings of sinks."""

from __future__ import annotations

import pytest

from kvactors.errors import ConfigError, SinkError
from kvactors.flush_notifier.sinks import make_sinks
from kvactors.layout.gqa import GQALayout
from kvactors.settings import Config
from kvactors.settings.sinks import AttentionStoreSinkConfig, KvEventsSinkConfig, MemorySinkConfig

LAYOUT = GQALayout(1, 1, 2, 4)


def with_sinks(*sinks, **tables):
    return Config.from_mapping({"flush": {"sinks": list(sinks)}, **tables})


@pytest.mark.parametrize("name", ["FD_AS_ONLY_FLUSH", "ENABLE_EP_DP_IN_FD"])
@pytest.mark.parametrize("value", ["maybe", "true", "2", "-1"])
def test_a_switch_is_0_or_1(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be 0 or 1, not '{value}'"):
        Config.from_env({name: value})


def test_each_kind_of_sink_has_its_own_settings():
    sinks = with_sinks(
        {"kind": "memory"},
        {"kind": "kv_events", "dp_rank": 2},
        {"kind": "attention_store", "name": "as"},
    ).flush.sinks
    assert [type(sink) for sink in sinks] == [
        MemorySinkConfig,
        KvEventsSinkConfig,
        AttentionStoreSinkConfig,
    ]
    assert [sink.label for sink in sinks] == ["memory", "kv_events", "as"]
    assert (sinks[2].granularity, sinks[2].report_gains_at, sinks[2].tiers) == (
        "node",
        "request_finish",
        ("device", "host"),
    )
    assert sinks[1].tiers == ("device", "host", "storage")


@pytest.mark.parametrize(
    ("sink", "complaint"),
    [
        (
            {"kind": "kv_event"},
            r"unknown flush\.sinks\.kind 'kv_event'\. Did you mean 'kv_events'\? There are memory, jsonl",
        ),
        ({"name": "x"}, r"flush\.sinks\.kind is missing"),
        ({"kind": "memory", "path": "x"}, r"unknown key 'flush\.sinks\.path'"),
        ({"kind": "jsonl"}, "path is missing"),
        ({"kind": "memory", "tiers": []}, "at least one tier"),
        ({"kind": "memory", "tiers": ["gpu"]}, "gpu"),
        ({"kind": "attention_store", "granularity": "per_tier"}, "must be 'node'"),
        ({"kind": "kv_events", "granularity": "node"}, "must be 'per_tier'"),
        ({"kind": "kv_events", "dialect": "json"}, "json"),
        ({"kind": "kv_events", "endpoint": "http://x"}, "endpoint must begin with tcp://"),
        ({"kind": "kv_events", "endpoint": ""}, "endpoint must begin with"),
        ({"kind": "kv_events", "dp_rank": -1}, "dp_rank must be at least 0"),
        ({"kind": "kv_events", "replay_window": 0}, "replay_window must be at least 1"),
        (
            {"kind": "kv_events", "high_water_mark": 1 << 31},
            "high_water_mark must be at most 2147483647",
        ),
        ({"kind": "kv_events", "detail_topic": "x"}, "would get 'x' as well"),
        ({"kind": "kv_events", "detail_endpoint": "tcp://*:1"}, "need a detail_topic"),
        (
            {
                "kind": "kv_events",
                "snapshot_interval_s": float("nan"),
                "detail_topic": "x",
                "topic": "y",
            },
            "snapshot_interval_s",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(sink, complaint):
    with pytest.raises(ConfigError, match=complaint):
        with_sinks(sink)


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"shard_id": 2, "shard_num": 2}, r"shard_id must be in 0\.\.1"),
        ({"ready_timeout_s": 0}, "ready_timeout_s"),
        ({"platform": "tpu"}, "tpu"),
        ({"pod": "x"}, "Did you mean 'pod_name'"),
    ],
)
def test_settings_of_attention_store_that_cannot_be_are_named(table, complaint):
    with pytest.raises(ConfigError, match=complaint):
        with_sinks({"kind": "attention_store"}, attention_store=table)


def test_rank_0_alone_reports_to_attention_store():
    config = with_sinks(
        {"kind": "attention_store"},
        {"kind": "memory"},
        attention_store={"shard_id": 1, "shard_num": 2},
    )
    assert [sink.name for sink in make_sinks(config, LAYOUT)] == ["memory"]


def test_a_missing_sdk_is_named():
    with pytest.raises(SinkError, match="attentionstore_sdk"):
        make_sinks(with_sinks({"kind": "attention_store"}), LAYOUT)


@pytest.mark.parametrize(
    "sinks", [[], [{"kind": "memory"}], [{"kind": "attention_store", "name": "as"}]]
)
def test_flush_only_with_the_attention_store_back_end_means_its_index(sinks):
    base = {
        "cache": {"model": "m"},
        "storage": {"backend": "attention_store", "write_policy": "write_through"},
    }
    made = Config.from_env(
        {"FD_AS_ONLY_FLUSH": "1"}, Config.from_mapping({**base, "flush": {"sinks": sinks}})
    )
    assert [sink.kind for sink in made.flush.sinks].count("attention_store") == 1
    assert Config.from_env({"FD_AS_ONLY_FLUSH": "1"}, made) == made
    assert not Config.from_env({}, Config.from_mapping(base)).flush.sinks
