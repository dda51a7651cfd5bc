"""One vLLM engine for the benchmark `engine`: a script for a Python that has vLLM and kvactors.

It serves made-up prompts with a model of random weights. Each line of its input asks for something,
and is answered with a line of JSON: `prepare`, `round`, `close`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.benchmarks.lines import answer_lines, processor_seconds

BLOCK = 32  # attention on a CPU takes multiples of 32
LENGTH = 16 * BLOCK
"""Tokens of a prompt."""
DEVICE_BLOCKS = 80
CHUNK_BYTES = BLOCK * 8 * 2 * 4 * 64 * 4
"""Tokens, layers, keys and values, heads, head size, bytes of a float32: 512 KiB."""
HOST_CHUNKS = 40
"""Two and a half prompts."""
PROMPTS = 8
LONG = 48
"""Tokens that are sampled while other prompts come and go."""
EVERY = 4
"""Of those tokens, between two of those prompts."""
RETURNING = 10
"""Those prompts."""
SHORT = 8
"""Tokens of the prompt of the long request."""

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
    common: dict[str, Any] = {"cpu_bytes_to_use": HOST_CHUNKS * CHUNK_BYTES}
    if kind == "ours":
        storage = {"backend": "file", "directory": str(folder / "ours"), "capacity_blocks": 1000}
        spec = {"spec_name": "KVActorsOffloadingSpec"}
        spec["spec_module_path"] = "kvactors.integrations.vllm"
        return common | spec | {"storage": storage}
    spec = {"spec_module_path": "tests.benchmarks.engine_specs", "spec_name": "VllmTiers"}
    return common | spec | {"secondary_tiers": [{"type": "fs", "root_dir": str(folder / "fs")}]}


class Cost(NamedTuple):
    """The cost of a request.

    Attributes:
        seconds: on the clock.
        processor: seconds of the processor, of all threads of the engine.
        cached: tokens of the prompt that were not computed.
        steps_per_second: steps of the engine that computed something.
    """

    seconds: float
    processor: float
    cached: int
    steps_per_second: float


class Meter:
    """Clock and processor time since it was made."""

    def __init__(self) -> None:
        self._processor = processor_seconds()
        self._began = time.perf_counter()

    def cost(self, cached: int, steps: int) -> Cost:
        """The cost since then."""
        seconds = time.perf_counter() - self._began
        return Cost(seconds, processor_seconds() - self._processor, cached, steps / seconds)


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, kind: str, folder: Path) -> None:
        import vllm

        (folder / "config.json").write_text(json.dumps(MODEL))
        settings: dict[str, Any] = {}
        if kind != "none":
            connector = {"kv_connector": "OffloadingConnector"}
            if kind == "ours":
                module = "kvactors.integrations.vllm"
                connector = {
                    "kv_connector": "KVActorsConnector",
                    "kv_connector_module_path": module,
                }
            settings["kv_transfer_config"] = {
                **connector,
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

    def add(self, prompt: list[int], max_tokens: int) -> set[str]:
        """Add a request. Returns the names that it may have in outputs."""
        from vllm import SamplingParams

        self._requests += 1
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        name = f"request-{self._requests}"
        internal = self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return {name, str(internal)}

    def steps(self) -> Iterator[list[Any]]:
        """Run the engine until no request is left. The outputs of each step."""
        while self._engine.has_unfinished_requests():
            yield self._engine.step()

    def first_token(self, prompt: list[int]) -> Cost:
        """The cost of the first token of a prompt."""
        meter = Meter()
        self.add(prompt, 1)
        cached = steps = 0
        for outputs in self.steps():
            cached = sum(output.num_cached_tokens or 0 for output in outputs) or cached
            steps += 1
        return meter.cost(cached, steps)

    def tokens_beside(self, number: int, returning: list[list[int]]) -> Cost:
        """The cost of a long request and of prompts that come while its tokens are sampled."""
        meter = Meter()
        long = self.add([3 + number % 900] * SHORT, LONG)
        waiting = list(returning)
        sampled = computed = cached = 0
        for outputs in self.steps():
            computed += bool(outputs)
            sampled += sum(output.request_id in long for output in outputs)
            cached += sum(output.num_cached_tokens or 0 for output in outputs if output.finished)
            if waiting and sampled >= EVERY * (len(returning) - len(waiting) + 1):
                self.add(waiting.pop(), 1)
        if waiting:
            raise RuntimeError(f"{len(waiting)} prompts of {len(returning)} were not added")
        return meter.cost(cached, computed)

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


def make_prompt(number: int) -> list[int]:
    """A prompt. Those of different numbers have no common prefix."""
    drawn = np.random.default_rng(number).integers(3, 1000, LENGTH)
    return [int(token) for token in drawn]


class Bench:
    """An engine, and the lines that it answers."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._engine = Engine(kind, folder)
        self._prompts = [make_prompt(number) for number in range(PROMPTS)]

    def prepare(self) -> None:
        """Compute, offload and write every prompt to storage."""
        for prompt in self._prompts:
            self._engine.first_token(prompt)
            self._engine.settle()

    def round(self, number: int) -> dict[str, Any]:
        """The figures of a round."""
        engine = self._engine
        costs = {"new": engine.first_token(make_prompt(PROMPTS + number))}
        engine.settle()
        prompt = self._prompts[number % PROMPTS]  # the host tier has evicted it
        for place in ("storage", "host"):
            costs[place] = engine.first_token(prompt)
            engine.settle()
        following = [self._prompts[(number + 1 + i) % PROMPTS] for i in range(RETURNING)]
        costs["beside"] = engine.tokens_beside(number, following)
        engine.settle()
        return {place: cost._asdict() for place, cost in costs.items()}

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kvactors-bench-engine-") as folder:
        answer_lines(lambda: Bench(sys.argv[1], Path(folder)))
