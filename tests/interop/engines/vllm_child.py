"""vLLM engines that answer lines of JSON: the program that runs in vLLM's environment."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import sys
from typing import Any

IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
)
"""Modules that an engine of the tests imports."""
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

    llm: Any = None

    def open(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Start the engine. settings: arguments of vLLM's `LLM` beside `TINY`."""
        import vllm

        self.llm = vllm.LLM(**(TINY | settings))
        ours = sorted(name for name in sys.modules if name.partition(".")[0] == "kvactors")
        return {"version": vllm.__version__, "kvactors": ours}

    def _sampling(self, max_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Serve prompts greedily, all at once."""
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        done = self.llm.generate(inputs, self._sampling(max_tokens), use_tqdm=False)
        return {
            "tokens": [list(one.outputs[0].token_ids) for one in done],
            "cached": [one.num_cached_tokens for one in done],
        }

    def storm(
        self, prompts: list[list[int]], max_tokens: int, seed: int, resets: bool
    ) -> dict[str, Any]:
        """Serve prompts that come at random steps, and cancel some at random steps.

        resets: whether the caches are reset at random steps too.
        """
        greedy = self._sampling(max_tokens)
        engine = self.llm.llm_engine
        draw = random.Random(seed)
        waiting = list(enumerate(prompts))[::-1]
        running: dict[str, int] = {}
        tokens: list[list[int] | None] = [None] * len(prompts)
        counts = {"resets": 0, "cancelled": 0, "steps": 0}
        while waiting or engine.has_unfinished_requests():
            while waiting and (not running or draw.random() < 0.3):
                index, ids = waiting.pop()
                name = f"storm-{seed}-{index}"
                engine.add_request(name, {"prompt_token_ids": ids}, greedy)
                running[name] = index
            if running and draw.random() < 0.03:
                name = draw.choice(sorted(running))
                del running[name]
                engine.abort_request([name])
                counts["cancelled"] += 1
            if resets and draw.random() < 0.04:
                # not with reset_running_requests: vLLM does not expect a request that it has
                # preempted to load in the next step, and ends with an AssertionError
                engine.reset_prefix_cache(reset_connector=draw.random() < 0.5)
                counts["resets"] += 1
            for output in engine.step():
                if output.finished and output.request_id in running:
                    tokens[running.pop(output.request_id)] = list(output.outputs[0].token_ids)
            counts["steps"] += 1
        return {"tokens": tokens} | counts

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


def main(name: str) -> None:
    """Import vLLM, then fork an engine for each connection to an abstract Unix socket.

    The import takes longer than all else in the start of a small engine. The first line of a
    connection has the file for the engine's output.
    """
    from answer_lines import answer

    for module in IMPORTED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of engines that have ended
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        while True:
            connection, _ = server.accept()
            if os.fork():
                connection.close()
                continue
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            first = json.loads(connection.makefile("r", buffering=1).readline())
            log = os.open(first["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.environ.update(first["variables"])
            connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
            with connection.makefile("rw", buffering=1) as lines:
                answer(Engine(), lines, lines)
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
