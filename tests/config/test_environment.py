"""A variable fills a setting that the config leaves unset. Where both have a value, the config's is
used and the variable is logged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import structlog

import kvactors
from kvactors.attention_sdk import sdk_settings
from kvactors.errors import ConfigError, SinkError
from kvactors.flush_notifier.sinks import make_sinks
from kvactors.layout import make_layout
from kvactors.settings import Config, load
from kvactors.settings.load import honoured

STORE = {"backend": "attention_store", "write_policy": "write_through"}
MODEL = {"cache": {"model": "m"}}
BASE = {**MODEL, "storage": STORE}
TP2 = {"layout": {"num_kv_heads": 2, "tensor_parallel": 2}}
SINK = {"kind": "attention_store", "name": "as"}

NOT_HONOURED = (
    "ENABLE_V1_KVCACHE_SCHEDULER",
    "ENABLE_V1_KVCACHE_MANAGER",
    "FD_ENABLE_V1_UPDATE_WEIGHTS",
    "FD_ENABLE_SWAP_SPACE_CLEARING",
    "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST",
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
    "FD_ENC_DEC_BLOCK_NUM",
    "FD_CACHE_PROC_EXIT_TIMEOUT",
    "FD_CACHE_PROC_ERROR_COUNT",
    "FD_WORKER_ALIVE_TIMEOUT",
    "FD_ENGINE_TASK_QUEUE_WITH_SHM",
    "FD_LOG_DIR",
    "FD_ATTENTION_BACKEND",
    "USE_KVCACHE_LOCK",
    "FD_USE_KVCACHE_LOCK",
    "DISABLE_PREFIX_CACHE_MM_MODEL",
    "MC_MAX_MR_SIZE",
    "MC_TCP_BIND_ADDRESS",
)
"""FastDeploy's variables about its KV cache that set nothing here. docs/how-to/fastdeploy.md has
the reason for each."""


@pytest.fixture(autouse=True)
def nothing_logged_yet(monkeypatch):
    monkeypatch.setattr(load, "_logged", set())


def resolved(environ, tables) -> tuple[Config, list[dict]]:
    """The config and the log events."""
    with structlog.testing.capture_logs() as logs:
        config = Config.from_env(environ, Config.from_mapping(tables))
    return config, logs


def filled(tables, environ=None, **cache) -> Config:
    """The settings as `open` completes them."""
    return Config.from_env(environ or {}, Config.from_mapping({"cache": cache, **tables}))


@pytest.mark.parametrize(
    ("name", "text", "field", "value", "mine"),
    [
        ("AS_NAMESPACE", "ns", "namespace", "ns", "mine"),
        ("AS_POD_NAME", "pod", "pod_name", "pod", "mine"),
        ("AS_MODEL_VERSION", "v7", "model_version", "v7", "mine"),
        ("ENABLE_EP_DP_IN_FD", "0", "role_suffix", False, True),
        ("ENABLE_EP_DP_IN_FD", "1", "role_suffix", True, False),
        ("AS_WRITE_TOTAL_TIMEOUT", "9", "write_total_timeout_s", 9.0, 0.0),
        ("AS_WRITE_TOTAL_TIMEOUT", "0", "write_total_timeout_s", 0.0, 9.0),
        ("AS_WRITE_SLICE_BLOCK_NUM", "7", "write_slice_blocks", 7, 100),
        ("AS_WRITE_SLICE_TIMEOUT", "2.5", "write_slice_timeout_s", 2.5, 10.0),
    ],
)
def test_a_variable_fills_an_unset_setting_and_never_replaces_a_set_one(
    name, text, field, value, mine
):
    config, logs = resolved({name: text}, BASE)
    assert (getattr(config.attention_store, field), logs) == (value, [])
    config, logs = resolved({name: text}, {**BASE, "attention_store": {field: mine}})
    assert getattr(config.attention_store, field) == mine
    assert [(log["variable"], log["setting"], log["log_level"]) for log in logs] == [
        (name, f"attention_store.{field}", "warning")
    ]
    _, logs = resolved({name: text}, {**BASE, "attention_store": {field: value}})
    assert logs == [], "they agree"


@pytest.mark.parametrize(("text", "mode"), [("1", "normal"), ("0", "flush_only")])
def test_flush_only_in_the_config_comes_before_the_variable(text, mode):
    config, logs = resolved({"FD_AS_ONLY_FLUSH": text}, {**BASE, "flush": {"mode": mode}})
    assert config.flush.mode == mode
    assert [(log["variable"], log["setting"], log["value"]) for log in logs] == [
        ("FD_AS_ONLY_FLUSH", "flush.mode", mode)
    ]


def test_the_other_variables_do_not_come_before_the_config_either():
    file = {"storage": {"backend": "file", "directory": "/mine"}}
    environ = {"FILE_BACKEND_STORAGE_DIR": "/x", "KVACTORS_MODEL": "other"}
    config, logs = resolved(environ, {**MODEL, **file})
    assert (config.storage.directory, config.cache.model) == ("/mine", "m")
    assert [log["variable"] for log in logs] == [*environ]
    mooncake = {"master_server_address": "10.0.0.1:5", "protocol": "tcp"}
    environ = {
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_MASTER_SERVER_ADDR": "10.0.0.2:5",
        "MOONCAKE_LOCAL_HOSTNAME": "10.0.0.3",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4096",
    }
    pool = {"backend": "mooncake", "mooncake": mooncake, "write_policy": "write_through"}
    config, logs = resolved(environ, {**MODEL, "storage": pool})
    assert config.storage.mooncake.master_server_address == "10.0.0.1:5"
    assert config.storage.mooncake.local_hostname == "10.0.0.3"
    assert [(log["variable"], log["setting"]) for log in logs] == [
        ("MOONCAKE_MASTER_SERVER_ADDR", "storage.mooncake.master_server_address")
    ]


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("FD_AS_ONLY_FLUHS", "FD_AS_ONLY_FLUSH"),
        ("FD_ONLY_FLUSH", "FD_AS_ONLY_FLUSH"),
        ("AS_POD_NAM", "AS_POD_NAME"),
        ("AS_WRITE_SLICE_BLOCKS", "AS_WRITE_SLICE_BLOCK_NUM"),
        ("KVACTORS_MODLE", "KVACTORS_MODEL"),
        ("KVACTORS_PINNED", None),
    ],
)
def test_an_unknown_variable_with_our_prefix_is_logged_once(name, similar):
    config, logs = resolved({name: "1"}, BASE)
    assert config == Config.from_env({}, Config.from_mapping(BASE))
    assert [(log["variable"], log.get("similar_to"), log["log_level"]) for log in logs] == [
        (name, similar, "warning")
    ]
    assert resolved({name: "1"}, BASE)[1] == []


def test_other_names_are_not():
    names = [*NOT_HONOURED, "FD_MODEL_USE_CACHE", "AS_SERVER", "PATH", "FD_PLUGINS"]
    assert resolved(dict.fromkeys(names, "1"), BASE)[1] == []
    # those that nothing uses are no error either
    environ = {"AS_POD_NAME": "x", "AS_WRITE_SLICE_TIMEOUT": "3", "AS_NAMESPACE": "ns"}
    assert resolved(environ, MODEL)[0].cache.model == "m"


def test_every_variable_is_in_the_page_for_operators_and_every_name_there_is_known():
    text = (Path(kvactors.__file__).parents[1] / "docs" / "how-to" / "fastdeploy.md").read_text()
    named = set(re.findall(r"`((?:FD|AS|KVACTORS|ENABLE|FILE|USE|DISABLE|MC)_[A-Z0-9_]+)`", text))
    assert named == {*honoured(), *NOT_HONOURED}


@pytest.mark.parametrize("backend", [{}, {"storage": {"backend": "memory"}}])
async def test_flush_only_mode_without_a_sink_is_an_error_at_start(backend, monkeypatch):
    alone = {"flush": {"mode": "flush_only"}, **backend}
    with pytest.raises(ConfigError, match=r"flush\.mode .* there is no sink: name one in flush\.s"):
        async with kvactors.open(alone):
            pass
    async with kvactors.open({**alone, "flush": {**alone["flush"], "sinks": [{"kind": "memory"}]}}):
        pass
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    with pytest.raises(ConfigError, match="FD_AS_ONLY_FLUSH=1"):
        async with kvactors.open(backend):
            pass
    async with kvactors.open({"flush": {"mode": "normal"}}):
        pass


@pytest.mark.parametrize(
    ("tables", "shards"),
    [
        ({}, 1),
        (TP2, 2),
        ({**TP2, "ranks": {"count": 2, "endpoint": "memory://environment"}}, 2),
        ({"attention_store": {"shard_num": 3}}, 3),
    ],
)
def test_the_number_of_shards_is_that_of_the_ranks(tables, shards):
    config = Config.from_mapping({**BASE, **tables})
    assert sdk_settings(config, make_layout(config.layout, 64)).shard_num == shards


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("AS_WRITE_SLICE_BLOCK_NUM", "0"),
        ("AS_WRITE_SLICE_BLOCK_NUM", "-1"),
        ("AS_WRITE_SLICE_TIMEOUT", "0"),
        ("AS_WRITE_SLICE_TIMEOUT", "nan"),
        ("AS_WRITE_SLICE_TIMEOUT", "inf"),
        ("AS_WRITE_TOTAL_TIMEOUT", "-5"),
        ("AS_WRITE_TOTAL_TIMEOUT", "nan"),
        ("AS_NAMESPACE", "a\0b"),
        ("KVACTORS_MODEL", "a\0b"),
    ],
)
def test_a_variable_that_is_used_is_checked_as_the_setting_is(name, text):
    tables = {**BASE, "cache": {}} if name == "KVACTORS_MODEL" else BASE
    with pytest.raises(ConfigError, match=f"{name}: (attention_store|cache)"):
        resolved({name: text}, tables)
    mine = {"write_slice_blocks": 5, "write_slice_timeout_s": 1.0, "write_total_timeout_s": 2.0}
    config, _ = resolved({name: text}, {**BASE, "attention_store": {**mine, "namespace": "n"}})
    assert config.attention_store.write_slice_blocks == 5, "it is not used"


@pytest.mark.parametrize("name", ["FD_AS_ONLY_FLUSH", "ENABLE_EP_DP_IN_FD"])
@pytest.mark.parametrize("value", ["maybe", "true", "2", "-1"])
def test_a_switch_is_0_or_1(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be 0 or 1, not '{value}'"):
        Config.from_env({name: value})


# -- sinks


def test_rank_0_alone_reports_to_attention_store_and_a_missing_sdk_is_named():
    layout = make_layout(Config().layout, 4)
    tables = {"flush": {"sinks": [SINK, {"kind": "memory"}]}}
    shard = {"attention_store": {"shard_id": 1, "shard_num": 2}}
    made = make_sinks(Config.from_mapping({**tables, **shard}), layout)
    assert [sink.name for sink in made] == ["memory"]
    with pytest.raises(SinkError, match="attentionstore_sdk"):
        make_sinks(Config.from_mapping(tables), layout)


@pytest.mark.parametrize("sinks", [[], [{"kind": "memory"}], [SINK]])
def test_flush_only_with_the_attention_store_back_end_means_its_index(sinks):
    made, _ = resolved({"FD_AS_ONLY_FLUSH": "1"}, {**BASE, "flush": {"sinks": sinks}})
    assert [sink.kind for sink in made.flush.sinks].count("attention_store") == 1
    assert Config.from_env({"FD_AS_ONLY_FLUSH": "1"}, made) == made
    assert not resolved({}, BASE)[0].flush.sinks


# -- the model


@pytest.mark.parametrize(
    "tables",
    [
        {"storage": {"backend": "file", "directory": "/x"}},
        {"storage": {"backend": "mooncake", "mooncake": {"master_server_address": "10.0.0.1:1"}}},
        {"storage": STORE},
        {"storage": {"backend": "package.module:Class"}},
        {"flush": {"sinks": [SINK]}},
        {"flush": {"mode": "flush_only", "sinks": [{"kind": "memory"}, SINK]}},
    ],
)
def test_storage_and_sinks_need_a_model(tables):
    needed = r"cache\.model is needed with (storage\.backend|flush\.sinks) .*KVACTORS_MODEL"
    with pytest.raises(ConfigError, match=needed):
        filled(tables)
    assert filled(tables, model="m").cache.model == "m"
    assert filled(tables, {"KVACTORS_MODEL": "m"}).cache.model == "m"
    assert filled(tables, {"AS_NAMESPACE": "m"}).cache.model == "m/v0"


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"storage": {"backend": "memory"}},
        {"flush": {"mode": "flush_only"}, "storage": {"backend": "file", "directory": "/x"}},
        {"flush": {"sinks": [{"kind": "memory"}, {"kind": "jsonl", "path": "/x"}]}},
    ],
)
def test_a_cache_without_storage_and_sinks_needs_no_model(tables):
    assert filled(tables).cache.model == ""


@pytest.mark.parametrize(
    ("cache", "table", "environ", "model"),
    [
        ({"model": "a"}, {"namespace": "b"}, {"KVACTORS_MODEL": "c", "AS_NAMESPACE": "d"}, "a"),
        ({}, {"namespace": "b"}, {"KVACTORS_MODEL": "c", "AS_NAMESPACE": "d"}, "c"),
        ({}, {"namespace": "b"}, {"AS_NAMESPACE": "d"}, "b/v0"),
        ({}, {}, {"AS_NAMESPACE": "d"}, "d/v0"),
        ({}, {"namespace": "b"}, {}, "b/v0"),
        ({}, {"model_version": "b"}, {}, "default_ns/b"),
        ({}, {}, {"AS_MODEL_VERSION": "7", "AS_NAMESPACE": "x/y"}, "x%2Fy/7"),
    ],
)
def test_the_order_in_which_a_model_is_looked_for(cache, table, environ, model):
    tables = {"attention_store": table} if table else {}
    assert filled({**tables, "flush": {"sinks": [SINK]}}, environ, **cache).cache.model == model
