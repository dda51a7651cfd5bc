"""FastDeploy's config, variables and files: read, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from kvactors.attention_sdk import complete
from kvactors.errors import ConfigError, LayoutError
from kvactors.integrations.fastdeploy import FastDeployOptions, PrefixCacheManager, tensors_by_rank
from kvactors.integrations.fastdeploy.lower_tiers import CacheKvsLayout, host_slots
from kvactors.integrations.fastdeploy.settings import WeightsVersion, read_settings
from kvactors.layout import MLALayout
from tests.integrations.fastdeploy.config import make_config

GIB = 1 << 30


def settings_of(config=None, environ=None, options=None, ranks=1, role="mixed", replica=0):
    return read_settings(
        config or make_config(), ranks, role, replica, options or {}, environ or {}
    )


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("ENABLE_V1_KVCACHE_SCHEDULER", "0", "must be 1, not '0': only the V1 scheduler"),
        ("ENABLE_V1_KVCACHE_MANAGER", "1", "must be 0, not '1': use CacheManager"),
        ("FD_ENABLE_SWAP_SPACE_CLEARING", "1", "must be 0, not '1': host memory stays"),
        ("USE_KVCACHE_LOCK", "1", "must be 0, not '1': copies run in this process"),
        ("FD_USE_KVCACHE_LOCK", "1", "must be 0, not '1': copies run in this process"),
        ("FD_AS_ONLY_FLUSH", "yes", "must be 0 or 1, not 'yes'"),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_named(variable, value, text):
    with pytest.raises(ConfigError, match=f"{variable} {text}"):
        settings_of(environ={variable: value})


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("kvcache_storage_backend", "redis", "kvcache_storage_backend 'redis': there are none"),
        ("kvcache_storage_backend", "none", None),
        ("kvcache_storage_backend", "", None),
        ("write_policy", "write_back", "write_policy 'write_back' needs ENABLE_V1"),
        ("block_size", 0, "block_size must be at least 1, not 0"),
        ("block_size", "64", "block_size must be a whole number"),
        ("num_cpu_blocks", -1, "num_cpu_blocks must be at least 0, not -1"),
        ("total_block_num", 1.5, "total_block_num must be a whole number"),
        ("swap_space", "big", "swap_space must be a number"),
        ("swap_space", True, "swap_space must be a number"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(field, value, text):
    config = make_config()
    setattr(config.cache_config, field, value)
    if text is None:
        PrefixCacheManager(config, 1, environ={})
        return
    with pytest.raises(ConfigError, match=text):
        PrefixCacheManager(config, 1, environ={})


def test_a_field_that_is_missing_is_named():
    config = make_config()
    del config.cache_config.enable_prefix_caching
    with pytest.raises(ConfigError, match=r"cache_config\.enable_prefix_caching is missing"):
        settings_of(config)
    config.model_config = None
    with pytest.raises(ConfigError, match="the config has no model_config"):
        settings_of(config)


@pytest.mark.parametrize(
    ("config", "settings", "text"),
    [
        ({}, {"role": "prefill"}, "splitwise_role 'prefill'"),
        ({}, {"role": "decode"}, "splitwise_role 'decode'"),
        (
            {"backend": "mooncake", "enable_prefix_caching": False},
            {},
            "'mooncake' needs enable_prefix_caching",
        ),
        ({}, {"environ": {"FD_AS_ONLY_FLUSH": "1"}}, "FD_AS_ONLY_FLUSH=1 needs"),
        ({"backend": "file"}, {"environ": {"FD_AS_ONLY_FLUSH": "1"}}, "FD_AS_ONLY_FLUSH=1 needs"),
        (
            {"backend": "attention_store"},
            {"ranks": 2, "options": {"attention_store": {"shard_id": 0}}},
            "attention_store.shard_id follows from the ranks",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(config, settings, text):
    with pytest.raises(ConfigError, match=text):
        settings_of(make_config(**config), **settings)


def test_the_file_store_needs_a_folder():
    with pytest.raises(ConfigError, match="needs FILE_BACKEND_STORAGE_DIR"):
        settings_of(make_config(backend="file"))
    found = settings_of(make_config(backend="file"), {"FILE_BACKEND_STORAGE_DIR": "/kv"})
    assert (found.storage.backend, found.storage.directory) == ("file", "/kv")
    option = {"storage": {"directory": "/other"}}
    assert settings_of(make_config(backend="file"), {}, option).storage.directory == "/other"


def test_replicas_of_one_node_have_separate_stores():
    config = make_config(backend="file")
    config.parallel_config.data_parallel_size = 4
    found = settings_of(config, {"FILE_BACKEND_STORAGE_DIR": "/kv"}, replica=2)
    assert (found.storage.rank, found.storage.ranks) == (2, 4)


def test_mooncakes_variables_are_read():
    environ = {
        "MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_MASTER_SERVER_ADDR": "10.0.0.1:50051",
        "MOONCAKE_LOCAL_HOSTNAME": "10.0.0.2",
        "MOONCAKE_PROTOCOL": "tcp",
    }
    found = settings_of(make_config(backend="mooncake"), environ)
    assert found.storage.mooncake["master_server_address"] == "10.0.0.1:50051"
    assert (found.storage.rank, found.storage.ranks) == (0, 1), "replicas share the pool"


def test_attention_stores_variables_are_read():
    environ = {"AS_NAMESPACE": "space", "AS_POD_NAME": "pod", "AS_WRITE_SLICE_BLOCK_NUM": "7"}
    found = settings_of(make_config(backend="attention_store"), environ, replica=3).config
    assert found.attention_store.namespace == "space"
    assert found.attention_store.write_slice_blocks == 7
    assert (found.attention_store.dp_id, found.attention_store.splitwise_role) == (3, "mixed")
    assert found.cache.model == "space/v0"


@pytest.mark.parametrize(
    ("variables", "pod"),
    [
        ({}, "default_pod_mixed_3"),
        ({"AS_POD_NAME": "test_pod"}, "test_pod_mixed_3"),
        ({"AS_POD_NAME": "test_pod", "ENABLE_EP_DP_IN_FD": "0"}, "test_pod"),
        ({"AS_POD_NAME": "test_pod", "ENABLE_EP_DP_IN_FD": "1"}, "test_pod_mixed_3"),
    ],
)
def test_the_pods_name_has_role_and_replica_unless_a_variable_is_0(variables, pod):
    config = settings_of(make_config(backend="attention_store"), variables, replica=3).config
    assert complete(config.attention_store, MLALayout(1, 64)).shard.pod == pod


def test_a_model_is_named_by_its_folder_or_by_a_variable():
    assert settings_of().config.cache.model == "tiny"
    assert settings_of(environ={"KVACTORS_MODEL": "big"}).config.cache.model == "big"
    assert settings_of(options={"model": "other"}).config.cache.model == "other"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"unknown": 1}, "unknown"),
        ({"storage": {"backend": "file"}}, "storage.backend is FastDeploy's"),
        ({"storage": {"write_policy": "write_back"}}, "storage.write_policy is FastDeploy's"),
        ({"storage": {"rank": 1}}, "storage.rank is FastDeploy's"),
        ({"staging_slots": 0}, "staging_slots"),
        ({"fetch_wait_s": -1}, "fetch_wait_s"),
        ({"attention_store": {"sdk": "x"}}, "has no use without AttentionStore"),
        ({"sinks": [{"kind": "smoke"}]}, "smoke"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_named(options, text):
    with pytest.raises(ConfigError, match=text):
        settings_of(options=options)
    assert settings_of(options=FastDeployOptions()).options == FastDeployOptions()


@pytest.mark.parametrize(
    ("options", "engine", "text"),
    [
        ({"storage": {"directory": "/x"}}, {}, "storage.directory has no use with storage none"),
        ({"storage": {"capacity_bytes": 5}}, {"cpu_blocks": 2}, "storage.capacity_bytes has no"),
        ({"storage": {"mooncake": {"protocol": "tcp"}}}, {"backend": "file"}, "storage.mooncake"),
        ({"storage": {"min_hits": 3}}, {"backend": "file"}, "storage.min_hits has no use"),
        ({"storage": {"io_depth": 3}}, {"backend": "attention_store"}, "storage.io_depth has no"),
        ({"fetch_wait_s": 3}, {"cpu_blocks": 2}, "fetch_wait_s has no use .* a host tier"),
        ({"staging_slots": 3}, {"backend": "attention_store"}, "staging_slots has no use"),
        ({"numa_node": 0}, {}, "numa_node has no use"),
        ({"copy_threads": 3}, {"backend": "attention_store"}, "copy_threads has no use"),
        ({"copy_threads": 65}, {}, "copy_threads must be at most 64, not 65"),
    ],
)
def test_an_option_without_a_use_is_refused(options, engine, text):
    with pytest.raises(ConfigError, match=text):
        settings_of(make_config(**engine), {"FILE_BACKEND_STORAGE_DIR": "/kv"}, options)


# -- sizes


def test_layers_of_drafts_are_cached_too():
    assert settings_of(make_config(drafts=1)).draft_layers == 1
    config = make_config(drafts=1)
    config.speculative_config.num_gpu_block_expand_ratio = 2
    with pytest.raises(ConfigError, match="num_gpu_block_expand_ratio is 2"):
        settings_of(config)


def test_the_longest_request_must_fit():
    config = make_config(6, max_model_len=25)
    with pytest.raises(ConfigError, match=r"total_block_num is 6, .* needs 7 blocks"):
        PrefixCacheManager(config, 1, environ={})
    config.cache_config.total_block_num = 7
    PrefixCacheManager(config, 1, environ={})


@pytest.mark.parametrize(
    ("blocks", "gib", "slots"), [(5, None, 5), (0, 2, 2048), (0, 0.5, 512), (5, 2, 5), (0, None, 0)]
)
def test_swap_space_becomes_blocks(blocks, gib, slots):
    found = settings_of(make_config(8, blocks, swap_space=gib))
    assert host_slots(found, GIB // 1024) == slots


def test_swap_space_that_holds_no_block_is_refused():
    with pytest.raises(ConfigError, match="swap_space is 1e-09 GiB"):
        host_slots(settings_of(make_config(swap_space=1e-9)), 1 << 20)


# -- the version of the weights


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("version: RL-STEP03-1712-uuid\n", "RL-STEP03"),
        ("# weights\nname: x\nversion: 'RL-STEP03-1712-uuid'  # now\n", "RL-STEP03"),
        ('version: "base"\n', "base"),
        (None, "default"),
    ],
)
def test_the_first_two_parts_of_a_version_name_the_weights(tmp_path, text, version):
    if text is not None:
        (tmp_path / "version.yaml").write_text(text, "utf-8")
    assert WeightsVersion(tmp_path).now() == version


@pytest.mark.parametrize("text", ["", "name: x\n", "version:\n", "  version: nested\n"])
def test_a_version_file_without_a_version_is_refused(tmp_path, text):
    (tmp_path / "version.yaml").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="has no line 'version: NAME'"):
        WeightsVersion(tmp_path).now()


# -- tensors


def tensor(*shape, dtype=np.uint8):
    return np.zeros(shape, dtype)


def test_names_become_layers_roles_and_ranks():
    named = {}
    for rank in range(2):
        for layer in range(2):
            named[f"value_caches_{layer}_rank{rank}.device{rank + 4}"] = tensor(3, 1, 4, 8)
            named[f"key_caches_{layer}_rank{rank}.device{rank + 4}"] = tensor(3, 1, 4, 8)
            named[f"key_cache_scales_{layer}_rank{rank}"] = tensor(3, 1, 4, dtype=np.float32)
            named[f"value_cache_scales_{layer}_rank{rank}"] = tensor(3, 1, 4, dtype=np.float32)
    ranks = tensors_by_rank(named)
    assert len(ranks) == 2
    layout = CacheKvsLayout(4, ranks[1])
    assert [(piece.layer, piece.role) for piece in layout.pieces] == [
        (layer, role) for layer in range(2) for role in ("key", "value", "key_scale", "value_scale")
    ]
    assert layout.ordered(ranks[1])[1] is named["value_caches_0_rank1.device5"]
    assert layout.block_bytes == 2 * (32 + 32 + 16 + 16)


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"caches_0_rank0": tensor(2, 8)}, "'caches_0_rank0' is no name of a cache tensor"),
        (
            {"key_caches_0_rank0": tensor(2, 8), "key_caches_0_rank0.device1": tensor(2, 8)},
            "a second tensor of layer 0, key",
        ),
        ({"key_caches_0_rank1": tensor(2, 8)}, r"of ranks \[1\]: they must be 0, 1"),
    ],
)
def test_names_that_do_not_fit_are_named(named, text):
    with pytest.raises(LayoutError, match=text):
        tensors_by_rank(named)


@pytest.mark.parametrize(
    ("tensors", "extra", "text"),
    [
        ({(0, "key"): tensor(2, 8), (2, "key"): tensor(2, 8)}, 0, "they must be consecutive"),
        ({(0, "key"): tensor(2, 8)}, 1, "1 layers of drafts, and 1 layers in all"),
        (
            {(0, "key"): tensor(2, 8), (1, "key"): tensor(2, 8), (1, "value"): tensor(2, 8)},
            0,
            "layer 1 has key, value, and the first layer has key",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensors, extra, text):
    with pytest.raises(LayoutError, match=text):
        CacheKvsLayout(4, tensors, extra)
