"""The layouts of a model's KV cache, from the config.json that its HuggingFace repository has.

Read are the fields that the Transformers library gives the models (num_hidden_layers,
num_key_value_heads, head_dim, kv_lora_rank, layer_types, ..), with the names that older families
use. States have the shapes that vLLM gives them (`MambaStateShapeCalculator`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvactors.errors import ConfigError
from kvactors.settings.check import convert, located, read_settings
from kvactors.settings.tables import GroupConfig, LayoutConfig

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
WIDTH = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("attention_head_dim", "head_dim", "kv_channels")
TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Tables with the language model of a multimodal one."""

DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "half": "float16"}

# -- types of layers

FULL, WINDOW, CHUNK, STATE = "full", "window", "chunk", "state"
"""What a layer keeps: keys and values of all tokens, of a window, of a chunk, or a state."""

KEPT = {
    "full_attention": (FULL,),
    "attention": (FULL,),
    "deepseek_sparse_attention": (FULL,),
    "sliding_attention": (WINDOW,),
    "chunked_attention": (CHUNK,),
    "linear_attention": (STATE,),
    "mamba": (STATE,),
    "mamba2": (STATE,),
    "recurrent": (STATE,),
    "conv": (STATE,),
    "hybrid": (FULL, STATE),
    "hybrid_sliding": (WINDOW, STATE),
    "moe": (),
    "mlp": (),
}
"""What the layers of a type keep. The types are those of `layer_types`."""

LISTS = ("layer_types", "layers_block_type", "block_types")
LETTERS = {
    "hybrid_override_pattern": {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"},
    "sliding_window_pattern": {"L": "sliding_attention", "G": "full_attention"},
}
"""Fields with the types of layers, as a list or a text."""

PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")

PATTERNS = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
    "gemma3n_text": 5,
    "gemma3_text": 6,
    "gemma4_text": 6,
}
"""`sliding_window_pattern` where config.json may leave it out, by model_type."""

STATE_FIELDS = ("ssm_cfg", "mamba_d_state", "ssm_state_size", "state_size", "mamba_num_heads")
"""Fields of models that have layers with a state."""

MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
MAMBA_HEAD_DIM = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
MAMBA_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
MAMBA_STATE = ("mamba_d_state", "ssm_state_size", "state_size")
MAMBA_KERNEL = ("mamba_d_conv", "conv_kernel")
MAMBA_EXPAND = ("mamba_expand", "expand")
STATE_DTYPE = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")

BY_HAND = "write [layout] and cache.groups by hand (docs/groups.md)"


class ModelLayout(NamedTuple):
    """A model's layouts.

    Attributes:
        layout: of the layers with full attention, for all ranks (`tensor_parallel` as asked for).
        groups: the layers with a window or a state, their sizes to be chosen (`num_blocks` is 1).
            The tensors of a state are those of one rank.
    """

    name: str
    layout: LayoutConfig
    groups: tuple[GroupConfig, ...]
    notes: tuple[str, ...]


def read_model(
    path: Path, *, dtype: str | None = None, tensor_parallel: int = 1, extra_layers: int = 0
) -> ModelLayout:
    """The layouts of the model of a config.json. dtype: of the cache, None for the model's."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = msgspec.json.decode(read_settings(file))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold an object, not {type(data).__name__}")
    return _Reader(str(file), data, dtype, tensor_parallel).layout(extra_layers)


class _Reader:
    def __init__(
        self, where: str, data: Mapping[str, Any], dtype: str | None, tensor_parallel: int
    ) -> None:
        self.outer = data
        names = data.get("architectures")
        first = names[0] if isinstance(names, list) and names else data.get("model_type")
        self.name = str(first or "unknown")
        self.data, part = _language_part(data)
        self.place = f"{where} ({self.name}{part})"
        self.asked_dtype, self.ranks = dtype, tensor_parallel
        self.notes: list[str] = []
        self.count = 0

    def layout(self, extra_layers: int) -> ModelLayout:
        if self.outer.get("is_encoder_decoder"):
            raise self._fault("an encoder-decoder model is not supported (is_encoder_decoder)")
        mtp = self.data.get("num_nextn_predict_layers", self.data.get("mtp_num_hidden_layers"))
        if isinstance(mtp, int) and mtp > 0 and not extra_layers:
            self.notes.append(
                f"the model has {mtp} MTP layer(s): with speculative decoding give "
                f"--extra-layers {mtp}"
            )
        layers = self._layers()
        full = {**self._attention(FULL, layers.pop(FULL)), "extra_layers": extra_layers}
        tables = []
        for kept, numbers in layers.items():
            table = {"name": kept, "num_blocks": 1}
            if kept == STATE:
                layout = {"kind": STATE, "num_layers": len(numbers), "options": self._state()}
                tables.append({**table, "kind": STATE, "layout": layout})
            else:
                layout = self._attention(kept, numbers)
                window = self._window(kept)
                tables.append({**table, "kind": WINDOW, "window": window, "layout": layout})
        with located(self.place):
            groups = convert(tables, tuple[GroupConfig, ...], "cache.groups")
            return ModelLayout(self.name, convert(full, LayoutConfig), groups, tuple(self.notes))

    # -- what each layer keeps

    def _layers(self) -> dict[str, list[int]]:
        """The numbers of the layers, by what they keep: FULL has some."""
        field, types = self._types()
        self.count = len(types)
        shared = self.data.get("num_kv_shared_layers")  # the last ones read those of another
        own = self.count - (self._checked("num_kv_shared_layers", shared) if shared else 0)
        found: dict[str, list[int]] = {FULL: []}
        for number, name in enumerate(types):
            if name not in KEPT:
                raise self._fault(f"{field} has {name!r:.60}, an unknown type of layers: {BY_HAND}")
            for kept in KEPT[name]:
                kind = FULL if kept in (WINDOW, CHUNK) and not self._window(kept) else kept
                if kind == STATE or number < own:
                    found.setdefault(kind, []).append(number)
        if found[FULL]:
            return found
        for kept in (WINDOW, CHUNK):
            if kept in found:
                self.notes.append(
                    f"{field} names no layer with full attention: the layers with a window of "
                    f"{self._window(kept):,} tokens are counted in full, as the layers of [layout]"
                )
                found[FULL] = found.pop(kept)
                return found
        raise self._fault(
            f"no layer has attention ({field}), and [layout] needs one. By hand give [layout] one "
            "layer with one head of one element, which stays unused, and cache.groups the states "
            "(docs/groups.md)"
        )

    def _types(self) -> tuple[str, list[str]]:
        """The type of each layer, and the field that names them."""
        for field in LISTS:
            if self.data.get(field):
                return field, self._of_all(field, self._list(field, str))
        for field, letters in LETTERS.items():
            pattern = self.data.get(field)
            if isinstance(pattern, str) and pattern:
                if unknown := set(pattern) - set(letters):
                    raise self._fault(f"{field} has {min(unknown)!r}, an unknown type: {BY_HAND}")
                return field, self._of_all(field, [letters[one] for one in pattern])
        count = self._layer_count()
        if self.data.get("mamba_d_ssm"):
            return "mamba_d_ssm", ["hybrid"] * count
        field, full, other = self._rule(count)
        return field, ["full_attention" if at in full else other for at in range(count)]

    def _of_all(self, field: str, types: list[str]) -> list[str]:
        """The types of all layers, from a list that has them or a part that is repeated."""
        given = [name for name in LAYERS if self.data.get(name) is not None]
        count = self._layer_count() if given else len(types)
        if field in ("block_types", "sliding_window_pattern"):
            types = types * -(-count // len(types))
        if len(types) < count:
            raise self._fault(f"{field} has {len(types)} entries, and {given[0]} is {count}")
        return types[:count]

    def _layer_count(self) -> int:
        count = self._count(LAYERS)
        with located(self.place):
            convert({"num_layers": count}, LayoutConfig)
        return count

    def _rule(self, count: int) -> tuple[str, Collection[int], str]:
        """A field that says which layers have full attention, these, and the type of the others."""
        data = self.data
        for field, other in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "conv")):
            if data.get(field):
                return field, self._list(field, int), other
        if data.get("attn_type_list"):
            flags = self._list("attn_type_list", int)
            return "attn_type_list", [at for at, one in enumerate(flags) if one], "linear_attention"
        if data.get("linear_attn_config"):
            numbers = self._list("full_attn_layers", int, self._kimi())
            return "linear_attn_config", [one - 1 for one in numbers], "linear_attention"
        if data.get("attn_layer_period"):
            offset = self._checked("attn_layer_offset", data.get("attn_layer_offset"), 0)
            period = self._count(("attn_layer_period",))
            return "attn_layer_period", range(offset, count, period), "mamba"
        if data.get("linear_num_value_heads"):
            every = self._every("full_attention_interval", count, 4)
            return "full_attention_interval", every, "linear_attention"
        for field in STATE_FIELDS:
            if data.get(field):
                return field, (), "mamba"
        return self._window_rule(count)

    def _window_rule(self, count: int) -> tuple[str, Collection[int], str]:
        """`_rule`, for models without states."""
        data = self.data
        if data.get("attention_chunk_size"):
            every: Collection[int] = self._every("no_rope_layer_interval", count, 4)
            if data.get("no_rope_layers"):
                flags = self._list("no_rope_layers", int)
                every = [at for at, one in enumerate(flags) if not one]
            return "attention_chunk_size", every, "chunked_attention"
        if not self._window(WINDOW):
            return "num_hidden_layers", range(count), ""
        if data.get("max_window_layers") is not None:
            full = range(self._checked("max_window_layers", data["max_window_layers"], 0))
            return "max_window_layers", full, "sliding_attention"
        usual = PATTERNS.get(str(data.get("model_type")))
        given = [name for name in PATTERN if data.get(name) is not None]
        if given or usual:
            field = given[0] if given else PATTERN[0]
            return field, self._every(field, count, usual), "sliding_attention"
        return "sliding_window", (), "sliding_attention"

    def _every(self, field: str, count: int, usual: int | None) -> range:
        """The numbers of the last layer in every so many."""
        value = self.data.get(field)
        step = self._checked(field, usual if value is None else value)
        return range(step - 1, count, step)

    def _window(self, kept: str) -> int:
        """Tokens of the window or the chunk. 0: the layers that have one attend to all tokens."""
        data = self.data
        if kept == CHUNK:
            return self._count(("attention_chunk_size",))
        used = data.get("use_sliding_window", "max_window_layers" not in data)
        if not used or not data.get("sliding_window"):
            return 0
        size = self._checked("sliding_window", data["sliding_window"], 2)
        longest = data.get("max_position_embeddings")
        return 0 if isinstance(longest, int) and size >= longest else size

    # -- keys and values

    def _attention(self, kept: str, numbers: list[int]) -> dict[str, Any]:
        common = {"num_layers": len(numbers), "tensor_parallel": self.ranks}
        if self.data.get("kv_lora_rank"):
            return {**common, **self._latent()}
        heads, kv_heads = self._count(HEADS), self._kv_heads(kept)
        for one in [kv_heads] if isinstance(kv_heads, int) else kv_heads:
            if heads % one:
                raise self._fault(f"{heads} attention heads are no multiple of {one} KV heads")
        if not isinstance(kv_heads, int) and len(kv_heads) >= self.count:
            extra = kv_heads[self.count :] if kept == FULL else []
            kv_heads = [kv_heads[number] for number in numbers] + extra
        dim = self._head_dim(kept, heads)
        if (value_dim := self.data.get("v_head_dim") or dim) != dim:
            raise self._fault(
                f"v_head_dim {value_dim!r:.60} is not head_dim {dim}: keys and values of different "
                "sizes need a layout class of your own (layout.kind)"
            )
        sizes = {"num_kv_heads": kv_heads, "head_dim": dim}
        return {**common, "kind": "gqa", **sizes, "dtype": self._dtype()}

    def _latent(self) -> dict[str, Any]:
        sizes = {
            "kv_lora_rank": self._count(("kv_lora_rank",)),
            "qk_rope_head_dim": self._count(("qk_rope_head_dim",)),
        }
        if self.data.get("index_head_dim"):
            self.notes.append("the sparse attention's cache has fp8 values with scales")
            return {**sizes, "kind": "dsa", "index_head_dim": self._count(("index_head_dim",))}
        return {**sizes, "kind": "mla", "dtype": self._dtype()}

    def _kv_heads(self, kept: str) -> int | list[int]:
        of_full = self.data.get("num_global_key_value_heads")  # Gemma 4
        if kept == FULL and of_full and self.data.get("attention_k_eq_v", True):
            return self._checked("num_global_key_value_heads", of_full)
        for name in ("num_key_value_heads_per_layer", *KV_HEADS):
            if isinstance(each := self.data.get(name), list):
                return [self._checked(name, one) for one in each]
        if self.data.get("multi_query") and not self.data.get("new_decoder_architecture"):
            return 1
        if self.data.get("multi_query_attention") is False:
            return self._count(HEADS)
        found = [name for name in KV_HEADS if self.data.get(name) is not None]
        return self._count(tuple(found)) if found else self._count(HEADS)

    def _head_dim(self, kept: str, heads: int) -> int:
        names = ("global_head_dim", *HEAD_DIM) if kept == FULL else HEAD_DIM
        if any(self.data.get(name) is not None for name in names):
            return self._count(names)
        width = self._count(WIDTH)
        if width % heads:
            raise self._fault(
                f"head_dim is missing, and hidden_size {width} is no multiple of {heads} heads"
            )
        return width // heads

    # -- states

    def _state(self) -> dict[str, Any]:
        """The tensors of one layer's state on one rank: the last inputs of its convolution, and
        the state of its recurrence."""
        kernel, width, recurrence = self._state_sizes()
        found: dict[str, Any] = {}
        if kernel > 1:
            dtype = self._model_dtype("add it, the states have it")
            found["conv"] = {"shape": [kernel - 1, width], "dtype": dtype}
        if recurrence:
            given = [self.data[name] for name in STATE_DTYPE if self.data.get(name)]
            dtype = self._named(given[0], BY_HAND) if given else "float32"
            found["ssm"] = {"shape": recurrence, "dtype": dtype}
        return found

    def _state_sizes(self) -> tuple[int, int, list[int]]:
        """The kernel of the convolution and its channels, and the shape of the recurrence."""
        data = self.data
        if data.get("linear_num_value_heads"):
            return self._gated_delta_net()
        if data.get("linear_attn_config"):
            return self._kimi_delta()
        if data.get("conv_L_cache"):
            channels = self._share("conv_dim", self._count(("conv_dim", *WIDTH)))
            return self._count(("conv_L_cache",)), channels, []
        if data.get("conv1d_width"):
            channels = self._share("lru_width", self._count(("lru_width", *WIDTH)))
            return self._count(("conv1d_width",)), channels, [channels]
        if any(data.get(name) for name in STATE_FIELDS):
            return self._mamba()
        if str(data.get("model_type")).startswith("minimax"):
            heads = self._count(HEADS)
            dim = self._head_dim(STATE, heads)
            return 0, 0, [self._share("num_attention_heads", heads), dim, dim]
        raise self._fault(f"no known field has the size of a layer's state: {BY_HAND}")

    def _gated_delta_net(self) -> tuple[int, int, list[int]]:
        keys, values, key_dim, value_dim, kernel = (
            self._count((f"linear_{name}",))
            for name in (
                "num_key_heads",
                "num_value_heads",
                "key_head_dim",
                "value_head_dim",
                "conv_kernel_dim",
            )
        )
        keys = self._share("linear_num_key_heads", keys)
        values = self._share("linear_num_value_heads", values)
        return kernel, 2 * keys * key_dim + values * value_dim, [values, value_dim, key_dim]

    def _kimi(self) -> Mapping[str, Any]:
        table = self.data["linear_attn_config"]
        if not isinstance(table, dict):
            raise self._fault(f"linear_attn_config must be an object, not {table!r:.60}")
        return table

    def _kimi_delta(self) -> tuple[int, int, list[int]]:
        table = self._kimi()
        heads, dim, kernel = (
            self._checked(f"linear_attn_config.{name}", table.get(name))
            for name in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
        heads = self._share("linear_attn_config.num_heads", heads)
        return kernel, 3 * heads * dim, [heads, dim, dim]

    def _mamba(self) -> tuple[int, int, list[int]]:
        kernel, size = self._count(MAMBA_KERNEL), self._count(MAMBA_STATE)
        if not any(self.data.get(name) for name in MAMBA_GROUPS):  # Mamba 1
            inner = self._count(MAMBA_EXPAND) * self._count(WIDTH)
            channels = self._share(f"{MAMBA_EXPAND[0]} * {WIDTH[0]}", inner)
            return kernel, channels, [channels, size]
        heads, groups = self._count(MAMBA_HEADS), self._count(MAMBA_GROUPS)
        dims = [self.data[name] for name in MAMBA_HEAD_DIM if self.data.get(name)]
        if not dims or dims[0] == "auto":
            dim = self._count(MAMBA_EXPAND) * self._count(WIDTH) // heads
        else:
            dim = self._count(MAMBA_HEAD_DIM)
        heads = self._share(MAMBA_HEADS[0], heads)
        # a rank has every group that its heads need: groups that are too few are repeated
        groups = 1 if groups % self.ranks else groups // self.ranks
        return kernel, heads * dim + 2 * groups * size, [heads, dim, size]

    # -- fields

    def _dtype(self) -> str:
        return self.asked_dtype or self._model_dtype("give the cache's with --dtype")

    def _model_dtype(self, remedy: str) -> str:
        for table in (self.data, self.outer):
            if found := table.get("dtype") or table.get("torch_dtype"):
                return self._named(found, remedy)
        raise self._fault(f"dtype is missing: {remedy}")

    def _named(self, dtype: Any, remedy: str) -> str:
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise self._fault(f"dtype {dtype!r:.60} is unknown: {remedy}")
        return DTYPES[name]

    def _share(self, name: str, count: int) -> int:
        """One rank's share of heads or channels."""
        if count % self.ranks:
            raise self._fault(f"{name} ({count}) cannot be shared among {self.ranks} ranks")
        return count // self.ranks

    def _list(self, name: str, kind: type, table: Mapping[str, Any] | None = None) -> list[Any]:
        found = (self.data if table is None else table).get(name)
        if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
            words = "texts" if kind is str else "whole numbers"
            raise self._fault(f"{name} must be a list of {words}, not {found!r:.60}")
        return found

    def _count(self, names: tuple[str, ...]) -> int:
        for name in names:
            if (value := self.data.get(name)) is not None:
                return self._checked(name, value)
        raise self._fault(f"{names[0]} is missing: is it the config.json of a language model?")

    def _checked(self, name: str, value: Any, least: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._fault(f"{name} must be a whole number above {least - 1}, not {value!r:.60}")
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
