"""The Llama of SGLang with sliding windows, under the name of a model that SGLang gives two pools."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.llama import LlamaForCausalLM


class MellumForCausalLM(LlamaForCausalLM):
    """`config.layer_types` names the layers with a window of `config.sliding_window` tokens."""

    def __init__(self, config: Any, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        for layer, kind in zip(self.model.layers, config.layer_types, strict=True):
            if kind == "sliding_attention":
                layer.self_attn.attn.sliding_window_size = config.sliding_window - 1

    def get_attention_sliding_window_size(self) -> int:
        """Tokens before the newest one that a layer with a window reads."""
        return int(self.config.sliding_window) - 1


def in_its_pool(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A call of SGLang's attention for CPUs, which reads the pool of the windows at the places that
    tokens have in the other pool."""

    def run(self: Any, q: Any, k: Any, v: Any, layer: Any, *given: Any, **named: Any) -> Any:
        pool = self.req_to_token_pool
        if layer.sliding_window_size > 0:
            places = self.token_to_kv_pool.translate_loc_from_full_to_swa(pool.req_to_token)
            self.req_to_token_pool = SimpleNamespace(req_to_token=places)
        try:
            return forward(self, q, k, v, layer, *given, **named)
        finally:
            self.req_to_token_pool = pool

    return run


for _name in ("forward_extend", "forward_decode"):
    _forward = getattr(TorchNativeAttnBackend, _name)
    setattr(TorchNativeAttnBackend, _name, in_its_pool(_forward))

EntryClass = MellumForCausalLM
