"""Layouts of models, from the config.json of their HuggingFace repositories."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

import kvactors
from kvactors.errors import ConfigError, LayoutError
from kvactors.layout import make_layout
from kvactors.settings.model import read_model
from tests.config.size_reports import size_report

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}
SHAPE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPE |= {"hidden_size": 4096, "torch_dtype": "bfloat16"}
HALF = ["chunked_attention", "full_attention"] * 16
GEMMA = {**SHAPE, "model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window": 1024}
GEMMA |= {"num_key_value_heads": 16}
GPT_OSS = {**SHAPE, "num_hidden_layers": 24, "head_dim": 64, "sliding_window": 128}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
QWEN = {
    **SHAPE,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
JAMBA = {
    **SHAPE,
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
NEMOTRON = {
    **SHAPE,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_hidden_layers": 52,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "bfloat16",
}
BAMBA = {
    **SHAPE,
    "num_hidden_layers": 32,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
FALCON = {**BAMBA, "attn_layer_indices": None, "mamba_d_ssm": 4096, "mamba_d_head": 32}
LFM2 = {**SHAPE, "num_hidden_layers": 16, "hidden_size": 2048, "conv_L_cache": 3}
LFM2 |= {"layer_types": ["conv", "conv", "full_attention", "conv"] * 4}
MINIMAX = {**SHAPE, "model_type": "minimax", "num_hidden_layers": 80, "num_attention_heads": 64}
MINIMAX |= {"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10}
KIMI = {
    "num_hidden_layers": 27,
    "torch_dtype": "bfloat16",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
GEMMA4 = {**SHAPE, "model_type": "gemma4_text", "num_hidden_layers": 30, "sliding_window": 1024}
GEMMA4 |= {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
LLAMA4 = {**SHAPE, "num_hidden_layers": 48, "num_attention_heads": 40, "attention_chunk_size": 8192}
QWEN2 = {**SHAPE, "num_hidden_layers": 28, "sliding_window": 4096, "use_sliding_window": True}
QWEN2 |= {"max_window_layers": 21}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float32"}


def write(folder, data):
    path = folder / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


# bytes of a token: 2 (key and value) * layers * heads * head dimension * bytes of an element, and
# for a latent layers * (rank + rope dimension) * bytes of an element
@pytest.mark.parametrize(
    ("data", "options", "kind", "token_bytes"),
    [
        (LLAMA, {}, "gqa", 2 * 32 * 8 * 128 * 2),
        (LLAMA, {"tensor_parallel": 4}, "gqa", 2 * 32 * 2 * 128 * 2),
        (LLAMA, {"tensor_parallel": 16}, "gqa", 2 * 32 * 1 * 128 * 2),
        (LLAMA, {"dtype": "uint8"}, "gqa", 2 * 32 * 8 * 128),
        ({**LLAMA, "head_dim": 64}, {}, "gqa", 2 * 32 * 8 * 64 * 2),
        ({**LLAMA, "torch_dtype": "torch.float16"}, {}, "gqa", 2 * 32 * 8 * 128 * 2),
        ({"text_config": LLAMA, "model_type": "vlm"}, {}, "gqa", 2 * 32 * 8 * 128 * 2),
        ({**LLAMA, "num_key_value_heads": [8, 4] * 16}, {}, "gqa", 2 * 16 * (8 + 4) * 128 * 2),
        (GPT2, {}, "gqa", 2 * 12 * 12 * 64 * 4),
        ({**GPT2, "multi_query": True}, {}, "gqa", 2 * 12 * 1 * 64 * 4),
        (DEEPSEEK, {}, "mla", 61 * 576 * 2),
        (DEEPSEEK, {"tensor_parallel": 8}, "mla", 61 * 576 * 2),
        (DEEPSEEK, {"extra_layers": 1}, "mla", 62 * 576 * 2),
        ({**DEEPSEEK, "index_head_dim": 128}, {}, "dsa", 61 * (656 + 132)),
    ],
)
def test_the_layout_of_a_model(tmp_path, data, options, kind, token_bytes):
    found = read_model(write(tmp_path, data), **options)
    layout = make_layout(found.layout, 16)
    assert (layout.kind, layout.block_bytes) == (kind, 16 * token_bytes)
    report = size_report(tmp_path, **options)
    assert (report.block_size, report.token_bytes) == (64, token_bytes)
    assert report.blocks_per_gib == (1 << 30) // (64 * token_bytes)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("{", "is no JSON"),
        ("[]", "must hold an object"),
        ({}, r"\(unknown\): num_hidden_layers is missing"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers must be a whole number above 0"),
        ({**LLAMA, "num_hidden_layers": "32"}, "must be a whole number above 0, not '32'"),
        ({**LLAMA, "num_hidden_layers": True}, "must be a whole number above 0, not True"),
        ({**LLAMA, "num_hidden_layers": 1 << 40}, r"LlamaForCausalLM\): .*num_layers"),
        ({**LLAMA, "num_key_value_heads": [8, 0]}, "num_key_value_heads must be a whole number a"),
        ({**LLAMA, "num_key_value_heads": [8, 5]}, "heads are no multiple of 5 KV heads"),
        ({**LLAMA, "num_key_value_heads": 5}, "32 attention heads are no multiple of 5 KV heads"),
        ({**LLAMA, "hidden_size": 4097}, "head_dim is missing, and hidden_size 4097"),
        ({**LLAMA, "v_head_dim": 64}, "v_head_dim 64 is not head_dim 128: .* layout class"),
        ({**LLAMA, "torch_dtype": "float4"}, "dtype 'float4' is unknown: .* --dtype"),
        ({k: v for k, v in LLAMA.items() if k != "torch_dtype"}, "dtype is missing"),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
        ({**LLAMA, "layer_types": ["linear_attention"]}, "layer_types has 1 entries, and num_hidd"),
        (
            {**LLAMA, "layer_types": ["linear_attention"] * 32},
            "no layer has attention .layer_types",
        ),
        ({**LLAMA, "layer_types": ["wavelet"] * 32}, "layer_types has 'wavelet', an unknown type"),
        ({**LLAMA, "layer_types": "full"}, "layer_types must be a list of texts, not 'full'"),
        ({**LLAMA, "layer_types": HALF}, "attention_chunk_size is missing"),
        ({**LLAMA, "mamba_d_state": 16}, r"no layer has attention \(mamba_d_state\).*cache.groups"),
        ({**NEMOTRON, "hybrid_override_pattern": "M*X"}, "pattern has 'X', an unknown type: write"),
        ({**JAMBA, "mamba_expand": None}, "mamba_expand is missing"),
        ({**QWEN, "linear_value_head_dim": "wide"}, "must be a whole number above 0, not 'wide'"),
        ({**QWEN, "mamba_ssm_dtype": "float4"}, "dtype 'float4' is unknown"),
        (
            {
                **QWEN,
                "linear_num_value_heads": 0,
                "layer_types": ["linear_attention", "attention"] * 24,
            },
            "no known field has the size of a layer's state: write",
        ),
        ({**GEMMA, "sliding_window": -1}, "sliding_window must be a whole number above 1, not -1"),
        ({"text_config": {}, "architectures": ["X"]}, "X.text_config.: num_hidden_layers is mi"),
    ],
)
def test_a_config_that_is_wrong_or_unknown_is_named(tmp_path, data, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        read_model(write(tmp_path, data))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, 128),  # 8 MiB blocks: four times the 16 reads and 16 writes at once
        ({"block_size": 1}, 656),  # 128 KiB blocks: what 4 GiB/s move in 20 ms
        ({"block_size": 1, "disk_rate": "1 GiB"}, 164),
        ({"block_size": 1, "disk_rate": "1 GiB", "host": "40 MiB"}, 40),  # an eighth of it
    ],
)
def test_transit_slots_follow_from_the_rate_of_the_disk(tmp_path, options, slots):
    report = size_report(write(tmp_path, LLAMA), disk="1 TiB", **options)
    (transit,) = (one for one in report.tiers if one.tier == "transit")
    assert (transit.blocks, transit.setting) == (slots, "host.transit_slots")


@pytest.mark.parametrize(
    ("data", "block_size", "every", "slots"),
    [
        (JAMBA, 64, 32, 8),  # 2,048 tokens. Transit slots have the bytes of 128 blocks of 1 MiB
        (JAMBA, 1024, 2, 128),
        (QWEN, 64, 50, 4),  # a snapshot has 49.1 times the bytes of a block
    ],
)
def test_large_snapshots_are_far_apart_and_have_few_transit_slots(
    tmp_path, data, block_size, every, slots
):
    report = size_report(write(tmp_path, data), block_size=block_size, disk="1 TiB")
    (group,) = report.groups
    assert f"every = {every}\n" in report.settings
    assert group.request_blocks == 8192 // (block_size * every) + 2
    (transit,) = (one for one in group.tiers if one.tier == "transit")
    assert (transit.blocks, transit.setting) == (slots, "cache.groups.transit_slots")


def test_options_that_cannot_be_are_named(tmp_path):
    path = write(tmp_path, LLAMA)
    with pytest.raises(ConfigError, match="--disk-rate is for"):
        size_report(path, host="1 GiB", disk_rate="1 GiB")
    with pytest.raises(ConfigError, match="--request-tokens must be at least 1, not 0"):
        size_report(path, request_tokens=0)
    with pytest.raises(LayoutError, match="8 KV heads cannot be shared among 3 ranks"):
        size_report(path, tensor_parallel=3)
    with pytest.raises(
        ConfigError, match=r"64 MiB holds no block of 73.69 MiB of the group 'state'"
    ):
        size_report(write(tmp_path, QWEN), device="64 MiB")


def test_remarks(tmp_path):
    for data in (DEEPSEEK, {**QWEN, "mtp_num_hidden_layers": 1}):
        (note,) = read_model(write(tmp_path, data)).notes
        assert "--extra-layers 1" in note


def attention(layers, heads=8, dim=128):
    """Bytes of a token."""
    return 2 * layers * heads * dim * 2


# bytes of a token of the layers with full attention, then of each group: of a token for windows,
# of a snapshot for states: layers * (inputs of the convolution + state of the recurrence)
@pytest.mark.parametrize(
    ("data", "ranks", "full", "window", "state"),
    [
        (GEMMA, 1, attention(10, 16), attention(52, 16), None),
        (GEMMA, 8, attention(10, 2), attention(52, 2), None),
        ({**GEMMA, "sliding_window_pattern": 2}, 1, attention(31, 16), attention(31, 16), None),
        (GPT_OSS, 1, attention(12, 8, 64), attention(12, 8, 64), None),
        (GEMMA4, 1, attention(5, 2, 512), attention(25), None),
        ({**GEMMA4, "num_kv_shared_layers": 10}, 1, attention(3, 2, 512), attention(17), None),
        (LLAMA4, 1, attention(12), attention(36), None),
        ({**LLAMA4, "no_rope_layers": [1, 0] * 24}, 1, attention(24), attention(24), None),
        (QWEN2, 1, attention(21), attention(7), None),
        ({**QWEN2, "use_sliding_window": False}, 1, attention(28), None, None),
        ({**QWEN2, "max_position_embeddings": 4096}, 1, attention(28), None, None),
        (
            {**QWEN2, "num_key_value_heads": [8] * 21 + [4] * 7},
            1,
            attention(21),
            attention(7, 4),
            None,
        ),
        (
            {**LLAMA, "sliding_window": 64, "sliding_window_pattern": "LLLG"},
            1,
            attention(8),
            attention(24),
            None,
        ),
        (QWEN, 1, attention(12, 2, 256), None, 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)),
        (QWEN, 4, attention(12, 1, 256), None, 36 * (3 * 2048 * 2 + 8 * 128 * 128 * 4)),
        (JAMBA, 1, attention(4), None, 28 * (3 * 8192 * 2 + 8192 * 16 * 4)),
        (NEMOTRON, 1, attention(4), None, 24 * (3 * (8192 + 2 * 8 * 128) + 8192 * 128) * 2),
        (BAMBA, 1, attention(3), None, 29 * (3 * (8192 + 256) * 2 + 8192 * 128 * 4)),
        (BAMBA, 2, attention(3, 4), None, 29 * (3 * (4096 + 256) * 2 + 4096 * 128 * 4)),
        (FALCON, 1, attention(32), None, 32 * (3 * (4096 + 256) * 2 + 4096 * 128 * 4)),
        (LFM2, 1, attention(4), None, 12 * 2 * 2048 * 2),
        (MINIMAX, 8, attention(10, 1), None, 70 * 8 * 128 * 128 * 4),
        (KIMI, 1, 7 * 576 * 2, None, 20 * (3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4)),
    ],
)
def test_layers_that_differ_are_groups(tmp_path, data, ranks, full, window, state):
    found = read_model(write(tmp_path, data), tensor_parallel=ranks)
    assert make_layout(found.layout, 16).block_bytes == 16 * full
    expected = {"window": window and 16 * window, "state": state}
    assert {one.kind: make_layout(one.layout, 16).block_bytes for one in found.groups} == {
        kind: size for kind, size in expected.items() if size
    }
    windows = [one.window for one in found.groups if one.kind == "window"]
    asked = data.get("attention_chunk_size", data.get("sliding_window"))
    assert windows == ([asked] if window else [])


MODELS = (LLAMA, DEEPSEEK, GEMMA4, GPT_OSS, LLAMA4, QWEN2, QWEN, JAMBA, NEMOTRON, BAMBA, FALCON)
MODELS += (LFM2, MINIMAX, KIMI)


@pytest.mark.parametrize("junk", ["x", "M*E", [], [None], ["x", 1], {}, {"x": 1}, -1, 1.5, True])
def test_a_field_of_any_other_type_is_an_error_or_left_out(tmp_path, junk):
    for data in MODELS:
        for name in data:
            with suppress(ConfigError, LayoutError):
                size_report(write(tmp_path, {**data, name: junk}))


def test_windows_of_all_layers_are_counted_in_full(tmp_path):
    found = read_model(write(tmp_path, {**LLAMA, "sliding_window": 4096}))
    assert (found.layout.num_layers, found.groups) == (32, ())
    (note,) = found.notes
    assert "sliding_window names no layer with full attention" in note
    assert "window of 4,096 tokens are counted in full" in note


@pytest.mark.parametrize("data", [GEMMA, QWEN])
async def test_the_printed_settings_have_room_for_the_requests_of_the_report(tmp_path, data):
    thin = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "sliding_window": 20}
    thin |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4}
    data = {**data, **{name: value for name, value in thin.items() if name in data}}
    path, tokens, sizes = write(tmp_path, data), 100, {"device": 2, "host": 4, "disk": 8}
    texts = {name: f"{size} MiB" for name, size in sizes.items()}
    report = size_report(path, block_size=8, request_tokens=tokens, **texts)
    tiers = [*report.tiers, *(one for group in report.groups for one in group.tiers)]
    for name, size in sizes.items():
        kinds = {"host": ("host", "transit"), "disk": ("storage",)}.get(name, (name,))
        taken = sum(one.bytes for one in tiers if one.tier in kinds)
        assert 0.8 * size < taken / (1 << 20) <= size
    file = tmp_path / "settings.toml"
    file.write_text(report.settings.replace("PATH", str(tmp_path / "store")))
    own = size_report(file, request_tokens=tokens)
    assert (own.tiers, own.groups, own.requests) == (report.tiers, report.groups, report.requests)
    assert report.requests > 1
    async with kvactors.open(file) as cache:
        leases = []
        for number in range(report.requests):
            prompt = range(number * tokens, (number + 1) * tokens)
            lease, at = await cache.acquire(f"{number}", prompt, chunk_tokens=8), 0
            leases.append(lease)
            while at < tokens:
                if at == lease.covered_tokens:
                    await lease.next_chunk(8)
                at = lease.pass_end(at, lease.covered_tokens)
                await lease.commit(at)
        for lease in leases:
            await lease.finish()
