"""Earlier names of settings work for one release: in a file, in a mapping, as an argument of a
table and as its attribute. Each use warns once and names the setting of today."""

from __future__ import annotations

import re
import tomllib
import warnings
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvactors.config import Config
from kvactors.errors import ConfigError
from kvactors.renamed_settings import earlier_names
from kvactors.sink_config import AttentionStoreSinkConfig, MemorySinkConfig
from tests.config.test_settings_are_read import settings

ROWS: tuple[tuple[str, str, Any, str, Any], ...] = (
    ("cache", "deadline", 5.0, "default_deadline_s", 5.0),
    ("device", "free_low", 0.25, "high_watermark", 0.75),
    ("device", "free_high", 0.5, "low_watermark", 0.5),
    ("host", "batch_from", 4096, "dma_min_bytes", 4096),
    ("flush", "only", True, "mode", "flush_only"),
    ("flush", "only", False, "mode", "normal"),
    ("actors", "start", 7.0, "open_timeout_s", 7.0),
    ("actors", "drain", 8.0, "drain_timeout_s", 8.0),
    ("actors", "restarts", 9, "max_restarts_per_minute", 9),
    ("ranks", "start", 6.0, "startup_timeout_s", 6.0),
)
SINKS = (
    ("view", "node", "granularity"),
    ("gains", "request_finish", "report_gains_at"),
)
BOTH_WATERMARKS = {"free_low": 0.25, "free_high": 0.5}


def given(table: str, earlier: str, value: Any) -> dict[str, Any]:
    """A mapping with one setting, and the other watermark, which must agree with it."""
    pair = BOTH_WATERMARKS if earlier in BOTH_WATERMARKS else {}
    return {table: {**pair, earlier: value}}


@pytest.mark.parametrize(("table", "earlier", "value", "name", "now"), ROWS)
def test_a_setting_under_its_earlier_name(table, earlier, value, name, now):
    data = given(table, earlier, value)
    with pytest.warns(DeprecationWarning, match="is deprecated") as warned:
        config = Config.from_mapping(data)
    texts = [str(one.message) for one in warned]
    assert (
        texts.count(f"the setting {table}.{earlier} is deprecated: it is called {table}.{name} now")
        == 1
    )
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
