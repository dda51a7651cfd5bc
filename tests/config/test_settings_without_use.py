"""A setting that would be ignored is an error, and a dumped config can be read again."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest

import kvactors
from kvactors.errors import ConfigError
from kvactors.settings import Config, LayoutConfig, StorageConfig, read_toml
from kvactors.settings.check import choices, convert, settings_of
from kvactors.settings.load import unused

LAYOUT_COMMON = {"kind", "num_layers", "layer_offset", "extra_layers", "extra_block_ratio"}
LAYOUT_COMMON |= {"tensor_parallel"}
LAYOUTS = {
    "gqa": {"num_kv_heads", "head_dim", "dtype", "quantization", "scale_dtype"},
    "mla": {"kv_lora_rank", "qk_rope_head_dim", "dtype", "quantization", "scale_dtype"},
    "dsa": {"kv_lora_rank", "qk_rope_head_dim", "index_head_dim"},
}
STORE_COMMON = {"backend", "write_policy", "min_hits", "fetch", "timeout_s", "exclusive"}
BY_SLOTS = {"max_fetch_blocks", "readers", "writers", "on_full", "on_full_wait_s"}
BY_SLOTS |= {"namespace", "rank", "ranks"}
CAPACITY = {"capacity_blocks", "capacity_bytes"}
PLACE = {"url", "endpoint", "region"}
ALL = set(StorageConfig.__struct_fields__)
STORES = {
    "none": BY_SLOTS,
    "memory": BY_SLOTS | CAPACITY,
    "file": ALL - {"mooncake", "valkey", "head_ranges"} - PLACE,
    "mooncake": BY_SLOTS | {"mooncake", "head_ranges"},
    "object": BY_SLOTS | PLACE | {"io_depth", "io_write_depth", "head_ranges"},
    "valkey": BY_SLOTS | {"valkey", "head_ranges"},
    "attention_store": set(),
}
WINDOW = {"name": "w", "kind": "window", "window": 64, "layout": {}, "num_blocks": 4}
USELESS = [
    *(
        ("layout", "kind", kind, name)
        for kind, used in LAYOUTS.items()
        for name in LayoutConfig.__struct_fields__
        if name not in used | LAYOUT_COMMON
    ),
    *(
        ("storage", "backend", kind, name)
        for kind, used in STORES.items()
        for name in sorted(ALL - used - STORE_COMMON)
    ),
]


def other_value(table: type[msgspec.Struct], name: str) -> Any:
    """A value that is allowed and is not the default."""
    setting = settings_of(table)[name]
    for value in (
        *choices(setting.hint),
        9,
        2.0,
        "1MB",
        not setting.default,
        {"protocol": "rdma"},
        {"ttl_s": 1},
    ):
        with suppress(ConfigError):
            convert({name: value}, table)
            if value != setting.default:
                return value
    raise AssertionError(name)


@pytest.mark.parametrize(("table", "by", "kind", "name"), USELESS)
def test_a_setting_that_a_layout_or_a_store_does_not_have_is_an_error(table, by, kind, name):
    struct = LayoutConfig if table == "layout" else StorageConfig
    with pytest.raises(
        ConfigError, match=rf"{table}\.{name} has no use with {table}\.{by} '{kind}'"
    ):
        Config.from_mapping({table: {by: kind, name: other_value(struct, name)}})


@pytest.mark.parametrize(
    ("table", "by", "kind"),
    [*(("layout", "kind", kind) for kind in LAYOUTS), *(("storage", "backend", k) for k in STORES)],
)
def test_every_other_setting_of_a_layout_or_a_store_has_a_use(table, by, kind):
    more = {"url": "s3://bucket"} if kind == "object" else {}
    config = Config.from_mapping({table: {by: kind, **more}})
    found = {one for one in unused(config) if table in one}
    without = {"layout.scale_dtype", "layout.extra_block_ratio"}  # have other conditions too
    useless = {f"{where}.{name}" for where, _, of, name in USELESS if (where, of) == (table, kind)}
    assert found - without == useless - without


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"storage": {"backend": "attention_store"}}, "storage.backend 'attention_store'"),
        ({"cache": {"groups": [WINDOW]}}, "cache.groups"),
    ],
)
def test_the_speed_of_the_engine_has_no_use_where_every_fetch_is_begun(tables, why):
    assert "cache.prefill_tokens_per_s" in unused(Config.from_mapping(tables))
    given = {**tables, "cache": {**tables.get("cache", {}), "prefill_tokens_per_s": 9.0}}
    with pytest.raises(ConfigError, match=f"cache.prefill_tokens_per_s has no use with {why}"):
        Config.from_mapping(given)


async def test_a_config_that_was_constructed_is_checked_when_a_cache_is_opened():
    config = Config(layout=LayoutConfig(kind="dsa", quantization="block_wise_fp8"))
    with pytest.raises(
        ConfigError, match=r"layout\.quantization has no use with layout\.kind 'dsa'"
    ):
        async with kvactors.open(config):
            pass


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_a_config_can_be_dumped_and_read_again(kind, tmp_path):
    text = f'[cache]\nmodel = "m"\n[layout]\nkind = "{kind}"\nkv_lora_rank = 128\n[storage]\nbackend = "file"\ndirectory = "/x"\n'
    (tmp_path / "c.toml").write_text(text)
    config = Config.from_mapping(read_toml(tmp_path / "c.toml"))
    assert Config.from_mapping(msgspec.to_builtins(config)) == config
