"""The Llama of SGLang."""

from sglang.srt.models.llama import LlamaForCausalLM

EntryClass = LlamaForCausalLM
