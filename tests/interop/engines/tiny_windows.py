"""A Gemma 3 and a gpt-oss of a few megabytes with random weights. Five of six layers of Gemma 3 and every
second layer of gpt-oss attend to a window. As in `tiny_llama`, earlier tokens decide the next one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.interop.engines.tiny_llama import write_safetensors

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, EXPERTS, INNER = 128, 4, 2, 32, 1024, 4, 64
BLOCKS_OF_GROUP = 26
"""Device blocks for each group of layers: a request of the longest length, and two blocks."""

SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA3 = SHAPE | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 96,
    "query_pre_attn_scalar": 4,  # queries and keys are normed: their products need a gain
}
# Without `quantization_config` the experts are float32: vLLM's kernel for mxfp4 needs a CPU with AMX.
GPT_OSS = SHAPE | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}


def settings(folder: Path, name: str) -> dict[str, Any]:
    """Settings of an engine of "gemma3" or "gpt_oss", whose folder is written, or of "llama", which
    overrides the configuration of the tiny Llama."""
    if name == "llama":
        windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 96}
        return {"hf_overrides": windows, "num_gpu_blocks_override": 2 * BLOCKS_OF_GROUP}
    # vLLM's groups have as many layers each as the model has with full attention
    models = {"gemma3": (GEMMA3, _gemma3, 6), "gpt_oss": (GPT_OSS, _gpt_oss, 2)}
    config, weights, groups = models[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = weights(np.random.default_rng(5), config["num_hidden_layers"])
    write_safetensors(folder / "model.safetensors", dict(tensors))
    return {"model": folder, "num_gpu_blocks_override": groups * BLOCKS_OF_GROUP}


def _matrix(random: np.random.Generator, *shape: int, gain: float = 1.0) -> np.ndarray:
    """gain: of a product with the last axis."""
    return random.standard_normal(shape, np.float32) * np.float32(gain / shape[-1] ** 0.5)


def _attention(random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    yield "self_attn.q_proj", _matrix(random, HEADS * HEAD_DIM, WIDTH, gain=2)
    yield "self_attn.k_proj", _matrix(random, KV_HEADS * HEAD_DIM, WIDTH, gain=2)
    yield "self_attn.v_proj", _matrix(random, KV_HEADS * HEAD_DIM, WIDTH, gain=2)
    yield "self_attn.o_proj", _matrix(random, WIDTH, HEADS * HEAD_DIM, gain=6)


def _gemma3(random: np.random.Generator, layers: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "model.embed_tokens.weight", _matrix(random, VOCABULARY, WIDTH)  # and the output's
    yield "model.norm.weight", np.zeros(WIDTH, np.float32)  # vLLM adds 1 to them
    for layer in range(layers):
        small = dict(_attention(random))
        small |= {f"mlp.{name}_proj": _matrix(random, INNER, WIDTH) for name in ("gate", "up")}
        small["mlp.down_proj"] = _matrix(random, WIDTH, INNER)
        small |= {f"self_attn.{name}_norm": np.zeros(HEAD_DIM, np.float32) for name in "qk"}
        for norm in ("input", "pre_feedforward", "post_feedforward"):
            small[f"{norm}_layernorm"] = np.zeros(WIDTH, np.float32)
        small["post_attention_layernorm"] = np.full(WIDTH, 3, np.float32)
        for name, tensor in small.items():
            yield f"model.layers.{layer}.{name}.weight", tensor


def _gpt_oss(random: np.random.Generator, layers: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "model.embed_tokens.weight", _matrix(random, VOCABULARY, WIDTH, gain=WIDTH**0.5)
    yield "lm_head.weight", _matrix(random, VOCABULARY, WIDTH, gain=3)
    yield "model.norm.weight", np.ones(WIDTH, np.float32)
    for layer in range(layers):
        small = {}
        for name, tensor in (*_attention(random), ("mlp.router", _matrix(random, EXPERTS, WIDTH))):
            small[f"{name}.weight"] = tensor
            small[f"{name}.bias"] = _matrix(random, len(tensor))
        small["self_attn.sinks"] = _matrix(random, HEADS, gain=4)
        for name, shape in {"gate_up": (WIDTH, 2 * INNER), "down": (INNER, WIDTH)}.items():
            small[f"mlp.experts.{name}_proj"] = _matrix(random, EXPERTS, *shape)
            small[f"mlp.experts.{name}_proj_bias"] = _matrix(random, EXPERTS, shape[1])
        for norm in ("input", "post_attention"):
            small[f"{norm}_layernorm.weight"] = np.ones(WIDTH, np.float32)
        for name, tensor in small.items():
            yield f"model.layers.{layer}.{name}", tensor
