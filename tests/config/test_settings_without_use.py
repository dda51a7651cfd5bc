"""A setting that would be ignored is an error, and a dumped config can be read again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import kvactors
from kvactors.errors import ConfigError
from kvactors.settings import Config, LayoutConfig, StorageConfig, read_toml
from kvactors.settings.load import LAYOUT_COMMON, LAYOUT_USES, STORAGE_USES

VALUES: dict[str, Any] = {
    "num_kv_heads": 4,
    "head_dim": 8,
    "dtype": "uint8",
    "quantization": "block_wise_fp8",
    "scale_dtype": "float16",
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 8,
    "index_head_dim": 128,
    "options": {"nonsense": 3},
    "extra_block_ratio": 2.0,
    "directory": "/x",
    "capacity_blocks": 9,
    "capacity_bytes": "4GB",
    "namespace": "n",
    "rank": 1,
    "ranks": 2,
    "free_space_floor": 7,
    "durability": "synced",
    "read_only": True,
    "io_depth": 9,
    "io_write_depth": 9,
    "keep_tokens": False,
    "scrub_rate": "1MB",
    "exclusive": True,
    "min_fetch_blocks": 2,
    "readers": 3,
    "writers": 3,
    "on_full": "shed",
    "on_full_wait_s": 2.0,
    "mooncake": {"protocol": "rdma"},
}

LAYOUTS = [
    (kind, name)
    for kind, used in LAYOUT_USES.items()
    for name in LayoutConfig.__struct_fields__
    if name not in used | LAYOUT_COMMON
]
STORES = [
    (kind, name)
    for kind, used in STORAGE_USES.items()
    for name in StorageConfig.__struct_fields__
    if name not in used
]

OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"layout": {"scale_dtype": "float16"}},
        r"layout\.scale_dtype has no use without layout\.quantization",
    ),
    (
        {"layout": {"extra_block_ratio": 2.0}},
        r"layout\.extra_block_ratio has no use without layout\.extra_layers",
    ),
    ({"device": {"place": "gpu:0"}}, r"device\.place has no use with device\.kind 'host'"),
    (
        {"device": {"kind": "cuda", "place": "gpu:0"}},
        r"device\.place has no use with device\.kind 'cuda'",
    ),
    (
        {"device": {"kind": "paddle", "ordinal": 1}},
        r"device\.ordinal has no use with device\.kind 'paddle'",
    ),
    (
        {"host": {"low_watermark": 0.1, "high_watermark": 0.2}},
        r"host\.low_watermark has no use without a host tier",
    ),
    (
        {"host": {"slots": 4, "staging_bytes": 0, "staging_min_bytes": 65536}},
        r"host\.staging_min_bytes has no use with host\.staging_bytes = 0",
    ),
    (
        {"attention_store": {"pod_name": "x"}},
        r"attention_store\.pod_name has no use without a sink",
    ),
    (
        {"cache": {"model": "m"}, "attention_store": {"namespace": "x"}},
        r"attention_store\.namespace has no use",
    ),
]


def given(table: str, kind_name: str, kind: str, name: str) -> dict[str, Any]:
    return {table: {kind_name: kind, name: VALUES[name]}}


@pytest.mark.parametrize(("kind", "name"), LAYOUTS)
def test_a_setting_that_a_layout_does_not_have_is_an_error(kind, name):
    with pytest.raises(ConfigError, match=rf"layout\.{name} has no use with layout\.kind '{kind}'"):
        Config.from_mapping(given("layout", "kind", kind, name))


@pytest.mark.parametrize(("kind", "name"), STORES)
def test_a_setting_that_a_store_does_not_have_is_an_error(kind, name):
    with pytest.raises(
        ConfigError, match=rf"storage\.{name} has no use with storage\.backend '{kind}'"
    ):
        Config.from_mapping(given("storage", "backend", kind, name))


@pytest.mark.parametrize(("tables", "complaint"), OTHERS)
def test_a_setting_without_use_is_an_error(tables, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Config.from_mapping(tables)


def test_a_setting_that_is_written_down_counts_also_at_its_default():
    with pytest.raises(ConfigError, match=r"layout\.quantization has no use"):
        Config.from_mapping({"layout": {"kind": "mla", "quantization": "none"}})


async def test_a_config_that_was_constructed_is_checked_when_a_cache_is_opened():
    config = Config(layout=LayoutConfig(kind="mla", quantization="block_wise_fp8"))
    with pytest.raises(
        ConfigError, match=r"layout\.quantization has no use with layout\.kind 'mla'"
    ):
        async with kvactors.open(config):
            pass


def test_variables_that_nothing_uses_are_no_error():
    environ = {"AS_POD_NAME": "x", "AS_WRITE_SLICE_TIMEOUT": "3", "AS_NAMESPACE": "ns"}
    assert (
        Config.from_env(environ, Config.from_mapping({"cache": {"model": "m"}})).cache.model == "m"
    )


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_a_config_can_be_dumped_and_read_again(kind, tmp_path):
    text = f'[cache]\nmodel = "m"\n[layout]\nkind = "{kind}"\nkv_lora_rank = 128\n[storage]\nbackend = "file"\ndirectory = "/x"\n'
    (tmp_path / "c.toml").write_text(text)
    config = Config.from_mapping(read_toml(tmp_path / "c.toml"))
    assert Config.from_mapping(msgspec.to_builtins(config)) == config
