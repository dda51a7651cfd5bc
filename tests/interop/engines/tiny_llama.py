"""A Llama of a few megabytes with random weights, for engines that need a folder of a model.

The weights are scaled so that the attention to earlier tokens decides the next token. With the
dummy weights of an engine the logits are almost flat, and a cache of zeros goes unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 256, 8, 2, 32, 1024

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}


def write_model(folder: Path, seed: int = 5) -> Path:
    """Write the model's folder, and return it. The same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generation = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_safetensors(folder / "model.safetensors", dict(_weights(np.random.default_rng(seed))))
    return folder


def _weights(random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        drawn = random.standard_normal((rows, columns), np.float32)
        return drawn * np.float32(gain / columns**0.5)

    yield "model.embed_tokens.weight", matrix(VOCABULARY, HIDDEN, HIDDEN**0.5)
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN, 3)
    yield "model.norm.weight", np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN, 2),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN, 2),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN, 1),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM, 2),
            "mlp.gate_proj": (2 * HIDDEN, HIDDEN, 1),
            "mlp.up_proj": (2 * HIDDEN, HIDDEN, 1),
            "mlp.down_proj": (HIDDEN, 2 * HIDDEN, 1),
        }
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", matrix(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors in the safetensors format: the header's length, the header as JSON, the
    bytes of the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").tobytes())
