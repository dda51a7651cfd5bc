"""The layout of a model's KV cache, from the config.json that its HuggingFace repository has.

Read are the fields that the Transformers library gives the models (num_hidden_layers,
num_key_value_heads, head_dim, kv_lora_rank, ..), with the names that older families use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvactors.errors import ConfigError
from kvactors.settings.check import convert, located, read_settings
from kvactors.settings.tables import LayoutConfig

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
WIDTH = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "kv_channels")
TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Tables with the language model of a multimodal one."""

DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "half": "float16"}

STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm"}
"""Kinds of layers that keep a state a request, and no key and value a token."""

STATE_FIELDS = ("ssm_cfg", "mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size")
"""Fields of models with such layers."""


class ModelLayout(NamedTuple):
    """A model's layout. layout: for all ranks (`tensor_parallel` as asked for)."""

    name: str
    layout: LayoutConfig
    notes: tuple[str, ...]


def read_model(
    path: Path, *, dtype: str | None = None, tensor_parallel: int = 1, extra_layers: int = 0
) -> ModelLayout:
    """The layout of the model of a config.json. dtype: of the cache, None for the model's."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = msgspec.json.decode(read_settings(file))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold an object, not {type(data).__name__}")
    return _Reader(str(file), data).layout(dtype, tensor_parallel, extra_layers)


class _Reader:
    def __init__(self, where: str, data: Mapping[str, Any]) -> None:
        self.outer = data
        self.name = str((data.get("architectures") or [data.get("model_type") or "unknown"])[0])
        self.data, part = _language_part(data)
        self.place = f"{where} ({self.name}{part})"
        self.notes: list[str] = []

    def layout(self, dtype: str | None, tensor_parallel: int, extra_layers: int) -> ModelLayout:
        self._check_supported()
        common: dict[str, Any] = {
            "num_layers": self._count(LAYERS),
            "extra_layers": extra_layers,
            "tensor_parallel": tensor_parallel,
        }
        mtp = self.data.get("num_nextn_predict_layers")
        if isinstance(mtp, int) and mtp > 0 and not extra_layers:
            self.notes.append(
                f"the model has {mtp} MTP layer(s): with speculative decoding give "
                f"--extra-layers {mtp}"
            )
        if self.data.get("kv_lora_rank"):
            fields = self._latent(dtype)
        else:
            heads, kv_heads = self._count(HEADS), self._kv_heads()
            for one in [kv_heads] if isinstance(kv_heads, int) else kv_heads:
                if heads % one:
                    raise self._fault(f"{heads} attention heads are no multiple of {one} KV heads")
            sizes = {"num_kv_heads": kv_heads, "head_dim": self._head_dim(heads)}
            fields = {"kind": "gqa", **sizes, "dtype": self._dtype(dtype)}
        with located(self.place):
            layout = convert({**common, **fields}, LayoutConfig)
        return ModelLayout(self.name, layout, tuple(self.notes))

    def _latent(self, dtype: str | None) -> dict[str, Any]:
        sizes = {
            "kv_lora_rank": self._count(("kv_lora_rank",)),
            "qk_rope_head_dim": self._count(("qk_rope_head_dim",)),
        }
        if self.data.get("index_head_dim"):
            self.notes.append("the sparse attention's cache has fp8 values with scales")
            return {**sizes, "kind": "dsa", "index_head_dim": self._count(("index_head_dim",))}
        return {**sizes, "kind": "mla", "dtype": self._dtype(dtype)}

    def _check_supported(self) -> None:
        if self.outer.get("is_encoder_decoder"):
            raise self._fault("an encoder-decoder model is not supported (is_encoder_decoder)")
        kinds = self.data.get("layer_types") or self.data.get("layers_block_type") or []
        strange = sorted({str(kind) for kind in kinds} & STATE_LAYERS)
        state = [name for name in STATE_FIELDS if self.data.get(name)]
        if strange or state:
            field = f"layer_types has {', '.join(strange)}" if strange else state[0]
            raise self._fault(
                f"layers that keep a state a request, not a key and value a token, are not "
                f"supported ({field})"
            )
        sliding = "sliding_attention" in kinds or "chunked_attention" in kinds
        if sliding or (self.data.get("sliding_window") and self.data.get("use_sliding_window")):
            self.notes.append(
                "layers with a sliding window are counted in full: a block holds every layer"
            )

    def _kv_heads(self) -> int | list[int]:
        for name in ("num_key_value_heads_per_layer", *KV_HEADS):
            if isinstance(each := self.data.get(name), list):
                return [self._checked(name, one) for one in each]
        if self.data.get("multi_query") and not self.data.get("new_decoder_architecture"):
            return 1
        if self.data.get("multi_query_attention") is False:
            return self._count(HEADS)
        found = [name for name in KV_HEADS if self.data.get(name) is not None]
        return self._count(tuple(found)) if found else self._count(HEADS)

    def _head_dim(self, heads: int) -> int:
        if any(self.data.get(name) is not None for name in HEAD_DIM):
            return self._count(HEAD_DIM)
        width = self._count(WIDTH)
        if width % heads:
            raise self._fault(
                f"head_dim is missing, and hidden_size {width} is no multiple of {heads} heads"
            )
        return width // heads

    def _dtype(self, asked: str | None) -> str:
        if asked is not None:
            return asked
        for table in (self.data, self.outer):
            found = table.get("dtype") or table.get("torch_dtype")
            if found:
                name = str(found).removeprefix("torch.")
                if name not in DTYPES:
                    raise self._fault(f"dtype {found!r} is unknown: give the cache's with --dtype")
                return DTYPES[name]
        raise self._fault("dtype is missing: give the cache's with --dtype")

    def _count(self, names: tuple[str, ...]) -> int:
        for name in names:
            if (value := self.data.get(name)) is not None:
                return self._checked(name, value)
        raise self._fault(f"{names[0]} is missing: is it the config.json of a language model?")

    def _checked(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._fault(f"{name} must be a whole number above 0, not {value!r:.60}")
        return value

    def _fault(self, text: str) -> ConfigError:
        return ConfigError(f"{self.place}: {text}")


def _language_part(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if any(name in data for name in LAYERS):
        return data, ""
    for name in TEXT_PARTS:
        part = data.get(name)
        if isinstance(part, dict):
            inner, deeper = _language_part(part)
            return inner, f".{name}{deeper}"
    return data, ""
