"""Runs in vLLM's interpreter: prompts with kvactors' tiers on a GPU and without, as one line of
JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main(model: str) -> dict[str, Any]:
    """Tokens of the same prompts without kvactors, computed, and loaded after the device has lost
    them."""
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(1024)]} for i in range(4)]
    parameters = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    common: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "max_model_len": 2048,
    }
    tiers = {
        "kv_connector": "KVActorsConnector",
        "kv_connector_module_path": "kvactors.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVActorsOffloadingSpec",
            "spec_module_path": "kvactors.integrations.vllm",
            "cpu_bytes_to_use": 1 << 28,
            "copy_worker": "kvactors",
        },
    }

    def tokens(engine: Any) -> tuple[list[list[int]], list[int], float]:
        began = time.perf_counter()
        answers = engine.generate(prompts, parameters)
        seconds = time.perf_counter() - began
        cached = [answer.num_cached_tokens or 0 for answer in answers]
        return [list(answer.outputs[0].token_ids) for answer in answers], cached, seconds

    engine = LLM(**common, kv_transfer_config=tiers)
    computed, _, first = tokens(engine)
    engine.reset_prefix_cache()
    loaded, cached, again = tokens(engine)
    del engine
    plain, _, _ = tokens(LLM(**common))
    return {
        "same": computed == loaded == plain,
        "cached": sum(cached),
        "computed_s": first,
        "loaded_s": again,
    }


if __name__ == "__main__":
    result = main(sys.argv[1])
    print(json.dumps(result), flush=True)
