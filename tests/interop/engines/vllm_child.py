"""A vLLM engine that answers lines of JSON: the program that runs in vLLM's environment.

Standard output carries the answers alone. The output of vLLM goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

TINY = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 768,
    "enforce_eager": True,
    "block_size": 32,  # attention on a CPU takes multiples of 32
    "num_gpu_blocks_override": 26,
    "enable_prefix_caching": True,
    "seed": 7,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 1024,
    "disable_log_stats": False,
}
"""Settings of the engine, which those of `open` override. `num_gpu_blocks_override` is the size of the
device cache on a CPU too. It is small, so that prompts are evicted."""


def _zero_device_cache(worker: Any) -> int:
    """Overwrite the device cache of a worker with zeros."""
    caches = worker.model_runner.kv_caches
    for cache in caches:
        cache.zero_()
    return len(caches)


class Engine:
    """The engine and the requests of one test."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.requests = 0

    def open(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Start the engine. settings: arguments of vLLM's `LLM` beside `TINY`."""
        import vllm

        self.llm = vllm.LLM(**(TINY | settings))
        return {"version": vllm.__version__, "kvactors": sorted(_modules("kvactors"))}

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, cancel: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Serve prompts greedily, all at once.

        cancel: by index of a prompt, the engine steps after which its request is aborted.
        """
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        engine = self.llm.llm_engine
        names = [f"request-{self.requests + i}" for i in range(len(prompts))]
        self.requests += len(prompts)
        inputs = zip(names, prompts, strict=True)
        added = {
            engine.add_request(name, {"prompt_token_ids": ids}, greedy) or name: name
            for name, ids in inputs
        }
        at_step: dict[int, list[str]] = {}
        for index, step in (cancel or {}).items():
            at_step.setdefault(step, []).append(list(added)[int(index)])
        outputs: dict[str, Any] = {}
        step = 0
        while engine.has_unfinished_requests():
            if step in at_step:
                engine.abort_request(at_step[step])
            for output in engine.step():
                if output.finished:
                    outputs[added.get(output.request_id, output.request_id)] = output
            step += 1
        done = [outputs.get(name) for name in names]
        finished = [one is not None and one.outputs[0].finish_reason == "length" for one in done]
        return {
            "tokens": [
                [int(token) for token in one.outputs[0].token_ids] if ok else None
                for one, ok in zip(done, finished, strict=True)
            ],
            "cached": [
                one.num_cached_tokens if ok else None
                for one, ok in zip(done, finished, strict=True)
            ],
            "steps": step,
        }

    def reset(self, *, connector: bool = False) -> dict[str, Any]:
        """Drop the device's prefix cache. connector: and the cache of the plug-in."""
        return {"reset": bool(self.llm.reset_prefix_cache(reset_connector=connector))}

    def zero_device(self) -> dict[str, Any]:
        """Overwrite the device cache with zeros, in every worker."""
        return {"tensors": self.llm.collective_rpc(_zero_device_cache)}

    def metrics(self) -> dict[str, Any]:
        """Counters and gauges by name, summed over their labels."""
        values: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                values[metric.name] = values.get(metric.name, 0.0) + float(value)
        return values

    def close(self) -> dict[str, Any]:
        """Shut the engine down in good order."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        return {}


def _modules(package: str) -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] == package}


def main() -> None:
    """Answer lines until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine()
    calls: dict[str, Callable[..., dict[str, Any]]] = {
        call.__name__: call
        for call in (
            engine.open,
            engine.generate,
            engine.reset,
            engine.zero_device,
            engine.metrics,
            engine.close,
        )
    }
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = calls[message.pop("do")](**message)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
