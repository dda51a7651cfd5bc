"""Layouts of models, from the config.json of their HuggingFace repositories."""

from __future__ import annotations

import json

import pytest

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
        ({**LLAMA, "torch_dtype": "float4"}, "dtype 'float4' is unknown: .* --dtype"),
        ({k: v for k, v in LLAMA.items() if k != "torch_dtype"}, "dtype is missing"),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
        (
            {**LLAMA, "layer_types": ["linear_attention"]},
            "not supported .layer_types has linear_att",
        ),
        ({**LLAMA, "mamba_d_state": 16}, r"not supported \(mamba_d_state\)"),
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


def test_options_that_cannot_be_are_named(tmp_path):
    path = write(tmp_path, LLAMA)
    with pytest.raises(ConfigError, match="--disk-rate is for"):
        size_report(path, host="1 GiB", disk_rate="1 GiB")
    with pytest.raises(LayoutError, match="8 KV heads cannot be shared among 3 ranks"):
        size_report(path, tensor_parallel=3)


def test_remarks(tmp_path):
    sliding = {**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}
    for data, words in ((DEEPSEEK, "--extra-layers 1"), (sliding, "sliding window")):
        (note,) = read_model(write(tmp_path, data)).notes
        assert words in note
