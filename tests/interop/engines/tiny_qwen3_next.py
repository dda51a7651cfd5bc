"""A Qwen3-Next of a few megabytes with random weights: every second layer keeps a state, the others
keys and values. As in `tiny_llama`, earlier tokens decide the next one: states forget a thousandth with
each token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.interop.engines.tiny_llama import write_safetensors

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,  # vLLM's kernels for a CPU have 128, and bfloat16
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def settings(folder: Path) -> dict[str, Any]:
    """Settings of an engine of this model, whose folder is written. vLLM's blocks of it have 544
    tokens: a state has the bytes of so many."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", dict(_weights(np.random.default_rng(5))))
    return {
        "model": folder,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "num_gpu_blocks_override": 20,
    }


def _weights(random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return random.standard_normal((rows, columns), np.float32) * np.float32(gain / columns**0.5)

    width, experts = 128, "mlp.experts"
    yield "model.embed_tokens.weight", matrix(1024, width, width**0.5)
    yield "lm_head.weight", matrix(1024, width, 3)
    yield "model.norm.weight", np.zeros(width, np.float32)  # 1 is added
    for layer in range(4):
        shapes = {"mlp.gate": (4, width, 1), "mlp.shared_expert_gate": (1, width, 1)}
        for part in ("mlp.shared_expert", *(f"{experts}.{number}" for number in range(4))):
            shapes |= {f"{part}.{name}_proj": (64, width, 1) for name in ("gate", "up")}
            shapes[f"{part}.down_proj"] = (width, 64, 1)
        if layer % 2:
            shapes |= {f"self_attn.{name}_proj": (128, width, 2) for name in "kv"}
            shapes |= {"self_attn.q_proj": (512, width, 2), "self_attn.o_proj": (width, 256, 6)}
            small = {f"self_attn.{name}_norm.weight": np.zeros(64, np.float32) for name in "qk"}
        else:
            shapes |= {"linear_attn.in_proj_qkvz": (1536, width, 2)}
            shapes |= {"linear_attn.in_proj_ba": (8, width, 1)}
            shapes |= {"linear_attn.out_proj": (width, 512, 6)}
            small = {
                "linear_attn.conv1d.weight": matrix(1024, 4)[:, None, :],
                "linear_attn.A_log": np.full(4, -6.0, np.float32),
                "linear_attn.dt_bias": np.zeros(4, np.float32),
                "linear_attn.norm.weight": np.ones(128, np.float32),
            }
        small |= {f"{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            small[f"{norm}.weight"] = np.zeros(width, np.float32)
        for name, tensor in small.items():
            yield f"model.layers.{layer}.{name}", tensor
