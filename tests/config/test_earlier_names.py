"""Earlier names of settings work for one release: in a file, in a mapping, as an argument of a
table and as its attribute. Each use warns once and names the setting of today."""

from __future__ import annotations

import json
import re
import tomllib
import typing
import warnings
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvactors.config import Config
from kvactors.errors import ConfigError
from kvactors.mooncake_config import MooncakeConfig, resolve
from kvactors.renamed_settings import earlier_names
from kvactors.setting_types import Seconds, SecondsOrZero
from kvactors.sink_config import (
    AnySinkConfig,
    AttentionStoreSinkConfig,
    KvEventsSinkConfig,
    MemorySinkConfig,
    SinkConfig,
)
from kvactors.tier_cache import TierStorage
from kvactors.tier_cache.settings import checked_config
from tests.config.test_settings_are_read import settings

ROWS: tuple[tuple[str, str, Any, str, Any], ...] = (
    ("cache", "deadline", 5.0, "default_deadline_s", 5.0),
    ("device", "free_low", 0.25, "high_watermark", 0.75),
    ("device", "free_high", 0.5, "low_watermark", 0.5),
    ("host", "batch_from", 4096, "dma_min_bytes", 4096),
    ("storage", "timeout", 3.0, "timeout_s", 3.0),
    ("flush", "only", True, "mode", "flush_only"),
    ("flush", "only", False, "mode", "normal"),
    ("flush", "timeout", 3.0, "timeout_s", 3.0),
    ("flush", "retry_min", 0.5, "retry_min_s", 0.5),
    ("flush", "retry_max", 3.0, "retry_max_s", 3.0),
    ("attention_store", "ready_timeout", 3.0, "ready_timeout_s", 3.0),
    ("attention_store", "ready_interval", 3.0, "ready_interval_s", 3.0),
    ("attention_store", "write_slice_timeout", 3.0, "write_slice_timeout_s", 3.0),
    ("attention_store", "write_total_timeout", 3.0, "write_total_timeout_s", 3.0),
    ("actors", "start", 7.0, "open_timeout_s", 7.0),
    ("actors", "drain", 8.0, "drain_timeout_s", 8.0),
    ("actors", "restarts", 9, "max_restarts_per_minute", 9),
    ("ranks", "start", 6.0, "startup_timeout_s", 6.0),
    ("ranks", "timeout", 3.0, "timeout_s", 3.0),
)
SINKS = (
    ("view", "node", "granularity"),
    ("gains", "request_finish", "report_gains_at"),
    ("resync_interval", 5.0, "resync_interval_s"),
)
OTHER_TABLES: tuple[tuple[type, str, str], ...] = (
    (MooncakeConfig, "timeout", "timeout_s"),
    (MooncakeConfig, "connect_timeout", "connect_timeout_s"),
    (KvEventsSinkConfig, "heartbeat", "heartbeat_s"),
    (KvEventsSinkConfig, "snapshot_interval", "snapshot_interval_s"),
    (TierStorage, "timeout", "timeout_s"),
    (TierStorage, "slot_timeout", "slot_timeout_s"),
    (TierStorage, "open_timeout", "open_timeout_s"),
    (TierStorage, "close_timeout", "close_timeout_s"),
)
BOTH_WATERMARKS = {"free_low": 0.25, "free_high": 0.5}
ATTENTION_STORE = {"flush": {"sinks": [{"kind": "attention_store"}]}}


def given(table: str, earlier: str, value: Any) -> dict[str, Any]:
    """A mapping with one setting, and the other watermark, which must agree with it."""
    pair = BOTH_WATERMARKS if earlier in BOTH_WATERMARKS else {}
    more = ATTENTION_STORE if table == "attention_store" else {}
    return {table: {**pair, earlier: value}, **more}


@pytest.mark.parametrize(("table", "earlier", "value", "name", "now"), ROWS)
def test_a_setting_under_its_earlier_name(table, earlier, value, name, now):
    data = given(table, earlier, value)
    with pytest.warns(DeprecationWarning, match="is deprecated") as warned:
        config = Config.from_mapping(data)
    texts = [str(one.message) for one in warned]
    text = f"the setting {table}.{earlier} is deprecated: it is called {table}.{name} now"
    if now != value:
        text += f", with the value {json.dumps(now)} in place of {json.dumps(value)}"
    assert texts.count(text) == 1
    assert len(texts) == len(data[table])
    assert attrgetter(f"{table}.{name}")(config) == now
    with pytest.warns(DeprecationWarning, match=f"{earlier} .* {name}") as warned:
        assert getattr(getattr(config, table), earlier) == value
    assert warned[0].filename == __file__
    kind = type(getattr(config, table))
    with pytest.warns(DeprecationWarning, match=f"{earlier} .* {name}") as warned:
        made = kind(**{earlier: value})
    assert getattr(made, name) == now
    assert [one.filename for one in warned] == [__file__]


@pytest.mark.parametrize(("table", "earlier", "value", "name", "now"), ROWS)
def test_a_setting_under_both_names_is_an_error(table, earlier, value, name, now):
    with pytest.raises(ConfigError, match=rf"^{table}\.{name} .* {table}\.{earlier}"):
        Config.from_mapping({table: {name: now, earlier: value}})


@pytest.mark.parametrize(("earlier", "value", "name"), SINKS)
def test_a_sink_s_setting_under_its_earlier_name(earlier, value, name):
    with pytest.warns(DeprecationWarning, match=rf"flush\.sinks\.{earlier} .*\.{name}") as warned:
        config = Config.from_mapping({"flush": {"sinks": [{"kind": "memory", earlier: value}]}})
    assert len(warned) == 1
    assert getattr(config.flush.sinks[0], name) == value
    for kind in (MemorySinkConfig, AttentionStoreSinkConfig):
        with pytest.warns(DeprecationWarning, match=earlier):
            assert getattr(kind(**{earlier: value}), name) == value
    with pytest.raises(ConfigError, match=rf"flush\.sinks\.{name} .*flush\.sinks\.{earlier}"):
        Config.from_mapping({"flush": {"sinks": [{"kind": "memory", earlier: value, name: value}]}})


def test_every_earlier_name_has_a_row():
    rows = {(table, earlier) for table, earlier, *_ in ROWS}
    tables = {name: getattr(Config(), name) for name in Config.__struct_fields__}
    found = {
        (table, earlier)
        for table, value in tables.items()
        for earlier, _ in earlier_names(type(value))
    }
    assert found == rows
    assert {name for name, _ in earlier_names(MemorySinkConfig)} == {one for one, *_ in SINKS}
    assert not {f"{table}.{earlier}" for table, earlier in rows} & set(settings(Config))


@pytest.mark.parametrize(("kind", "earlier", "name"), OTHER_TABLES)
def test_a_nested_setting_under_its_earlier_name(kind, earlier, name):
    with pytest.warns(DeprecationWarning, match=f"{earlier} .* {name}"):
        made = kind(**{earlier: 3.0})
    with pytest.warns(DeprecationWarning, match=f"{earlier} .* {name}"):
        assert getattr(made, name) == getattr(made, earlier) == 3.0
    rows = {one for each, one, _ in OTHER_TABLES if each is kind}
    if issubclass(kind, SinkConfig):
        rows |= {one for one, *_ in SINKS}
    assert {one for one, _ in earlier_names(kind)} == rows


def test_earlier_names_below_a_table():
    pool = {"master_server_address": "pool:1", "timeout": 3.0}
    storage = {"backend": "mooncake", "mooncake": pool}
    with pytest.warns(DeprecationWarning, match=r"storage\.mooncake\.timeout .*\.timeout_s"):
        config = Config.from_mapping({"storage": storage})
    assert config.storage.mooncake.timeout_s == 3.0
    tiers = {"model": "m", "block_bytes": 8, "num_slots": 1, "storage": {"slot_timeout": 3.0}}
    with pytest.warns(DeprecationWarning, match=r"storage\.slot_timeout .*\.slot_timeout_s"):
        assert checked_config(tiers).storage.slot_timeout_s == 3.0


def test_earlier_names_in_a_mooncake_file(tmp_path):
    file = tmp_path / "pool.json"
    file.write_text('{"master_server_addr": "pool:1", "connect_timeout": 3.0}', "utf-8")
    with pytest.warns(DeprecationWarning, match=r"\.connect_timeout .*\.connect_timeout_s"):
        found = resolve(MooncakeConfig(), {"MOONCAKE_CONFIG_PATH": str(file)})
    assert found.connect_timeout_s == 3.0


def test_settings_of_seconds_name_their_unit():
    kinds = [type(getattr(Config(), name)) for name in Config.__struct_fields__]
    kinds += [kind for kind, *_ in OTHER_TABLES]
    kinds += typing.get_args(AnySinkConfig)
    timed = {
        f"{kind.__name__}.{field.name}"
        for kind in kinds
        for field in msgspec.structs.fields(kind)
        if re.search("timeout|interval|heartbeat|retry_", field.name)
        or {Seconds, SecondsOrZero} & {field.type, *typing.get_args(field.type)}
    }
    assert {name for name in timed if not name.endswith("_s")} == set()
    assert len(timed) > 20


@pytest.mark.parametrize("value", ["", "yes", [1], {}, 3])
def test_a_wrong_value_is_named_under_the_name_of_today(value):
    with (
        pytest.warns(DeprecationWarning, match=r"flush\.only"),
        pytest.raises(ConfigError, match=r"flush\.mode|mode"),
    ):
        Config.from_mapping({"flush": {"only": value}})


@pytest.mark.parametrize("blocks", [1, 7, 10, 100, 1000, 12345])
@pytest.mark.parametrize("low", [0.0, 0.05, 0.1, 0.15, 0.25, 0.3, 1 / 3, 0.7, 1.0])
def test_watermarks_of_earlier_shares_are_the_same_numbers_of_blocks(blocks, low):
    high = min(1.0, 2 * low)
    with pytest.warns(DeprecationWarning, match="watermark"):
        device = Config.from_mapping({"device": {"free_low": low, "free_high": high}}).device
    assert device.free_blocks(blocks) == (int(low * blocks + 1e-9), int(high * blocks + 1e-9))


def test_settings_that_were_written_out_can_be_read_again():
    with pytest.warns(DeprecationWarning, match="watermark|default_deadline_s"):
        config = Config.from_mapping({"cache": {"deadline": 5.0}, "device": BOTH_WATERMARKS})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.from_mapping(msgspec.to_builtins(config)) == config


def test_nothing_that_is_shipped_has_an_earlier_name():
    root = Path(__file__).parents[2]
    found = []
    for path in sorted((root / "scenarios").glob("*.toml")):
        data = tomllib.loads(path.read_text("utf-8"))
        found += [
            f"{path.name}: {table}.{earlier}"
            for table, earlier, *_ in ROWS
            if earlier in data.get(table, {})
        ]
        found += [
            f"{path.name}: {earlier}"
            for sink in data.get("flush", {}).get("sinks", ())
            for earlier, *_ in SINKS
            if earlier in sink
        ]
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        text = path.read_text("utf-8")
        found += [
            f"{path.name}: {table}.{earlier}"
            for table, earlier, *_ in ROWS
            if re.search(rf"\b{table}\.{earlier}\b", text)
        ]
    assert found == []
