"""One vLLM engine for `bench engine`: a script for a Python that has vLLM and kvactors.

It serves made-up prompts with a model of random weights, and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

BLOCK = 32  # attention on a CPU takes multiples of 32
LENGTH = 16 * BLOCK
"""Tokens of a prompt."""
DEVICE_BLOCKS = 80
CHUNK_BYTES = BLOCK * 8 * 2 * 4 * 64 * 4
"""Tokens, layers, keys and values, heads, head size, bytes of a float32: 512 KiB."""
HOST_CHUNKS = 40
"""Two and a half prompts."""
PROMPTS = 8
LONG = 160
"""Tokens that are sampled while other prompts come and go."""
EVERY = 4
"""Steps between two of those prompts."""

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiers(kind: str, folder: Path) -> dict[str, Any]:
    """`kv_connector_extra_config` of a kind of engine."""
    common: dict[str, Any] = {"spec_module_path": "kvactors.bench.engine_specs"}
    common |= {"cpu_bytes_to_use": HOST_CHUNKS * CHUNK_BYTES}
    if kind == "ours":
        storage = {"backend": "file", "directory": str(folder / "ours"), "capacity_blocks": 1000}
        return common | {"spec_name": "Ours", "storage": storage}
    fs = {"type": "fs", "root_dir": str(folder / "fs")}
    return common | {"spec_name": "VllmTiers", "secondary_tiers": [fs]}


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, kind: str, folder: Path) -> None:
        import vllm

        (folder / "config.json").write_text(json.dumps(MODEL))
        settings: dict[str, Any] = {}
        if kind != "none":
            settings["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": tiers(kind, folder),
            }
        self._llm = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=LENGTH + 2 * LONG,
            enforce_eager=True,
            block_size=BLOCK,
            num_gpu_blocks_override=DEVICE_BLOCKS,
            enable_prefix_caching=True,
            max_num_seqs=4,
            max_num_batched_tokens=1024,
            disable_log_stats=True,
            **settings,
        )
        self._engine = self._llm.llm_engine
        self._requests = 0

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Add a request. Returns its name in outputs."""
        from vllm import SamplingParams

        self._requests += 1
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        name = f"request-{self._requests}"
        return str(self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling) or name)

    def steps(self) -> Iterator[list[Any]]:
        """Run the engine until no request is left. The outputs of each step."""
        while self._engine.has_unfinished_requests():
            yield self._engine.step()

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token of a prompt, and the tokens of it that were cached."""
        began = time.perf_counter()
        self.add(prompt, 1)
        cached = 0
        for outputs in self.steps():
            cached = sum(output.num_cached_tokens or 0 for output in outputs) or cached
        return time.perf_counter() - began, cached

    def settle(self) -> None:
        """Run short requests until copies and writes have ended, and forget the device's blocks."""
        for number in range(3):
            self.add([3 + number] * 8, 2)
            for _ in self.steps():
                pass
            time.sleep(0.02)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM does not reset its prefix cache")

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()


def make_prompts(count: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    drawn = np.random.default_rng(1).integers(3, 1000, (count, LENGTH))
    return [[int(token) for token in prompt] for prompt in drawn]


def measure(kind: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Every figure of one engine."""
    engine = Engine(kind, folder)
    prompts = make_prompts(PROMPTS)
    for prompt in prompts:  # computed, offloaded, and written to storage
        engine.first_token(prompt)
        engine.settle()
    found: dict[str, list[tuple[float, int]]] = {"storage": [], "host": []}
    for number in range(rounds):
        prompt = prompts[number % PROMPTS]  # the host tier has evicted it since its last use
        for place in ("storage", "host"):
            found[place].append(engine.first_token(prompt))
            engine.settle()
    began, count = time.perf_counter(), 0
    engine.add(make_prompts(PROMPTS + 1)[-1], LONG)
    for count, _ in enumerate(engine.steps(), 1):
        if count % EVERY == 0 and count < LONG:
            engine.add(prompts[count // EVERY % PROMPTS], 1)
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {
        "first_token_ms": {
            place: 1e3 * median(s for s, _ in times) for place, times in found.items()
        },
        "cached": {place: min(cached for _, cached in times) for place, times in found.items()},
        "steps_per_second": count / seconds,
    }
    if kind != "none":
        from kvactors.bench.engine_specs import TIMES

        result |= {
            "lookup_us": 1e6 * mean(TIMES.lookups),
            "lookups": len(TIMES.lookups),
            "load_ms": 1e3 * median(TIMES.loads),
            "store_ms": 1e3 * median(TIMES.stores),
        }
    engine.close()
    return result


def main() -> None:
    """Measure the engine that the command line names."""
    kind, rounds = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's output
    with tempfile.TemporaryDirectory(prefix="kvactors-bench-engine-") as folder:
        answers.write(json.dumps(measure(kind, rounds, Path(folder))) + "\n")


if __name__ == "__main__":
    main()
