"""An SGLang engine that answers lines of JSON: the program that runs in SGLang's environment."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

TINY = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "page_size": 32,
    "dtype": "float32",
    "max_total_tokens": 832,
    "max_running_requests": 2,
    "chunked_prefill_size": 512,
    "context_length": 768,
    "mem_fraction_static": 0.5,
    "random_seed": 7,
    "log_level": "info",
}
"""Settings of the engine, which those of `open` override. The device pool is small, so that prompts
are evicted."""

IDLE = 300.0
"""Seconds within which an engine must have nothing to do. Only a hang takes as long."""
NOT_IDLE = "not idle"
"""In SGLang's answer to a call that it makes only when it has nothing to do, if it has a reason."""


class Engine:
    """The engine and the requests of one test."""

    def __init__(self) -> None:
        self.sglang: Any = None
        self.requests = 0

    def open(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Start the engine. settings: arguments of SGLang's `Engine` beside `TINY`."""
        import sglang

        self.sglang = sglang.Engine(**(TINY | settings))
        return {"version": sglang.__version__}

    def _run(self, work: Any) -> Any:
        return self.sglang.loop.run_until_complete(work)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        cancel: dict[str, int] | None = None,
        at_once: int = 1,
    ) -> dict[str, Any]:
        """Serve prompts greedily.

        prompts: token ids. max_tokens: to sample. cancel: by index of a prompt, the tokens after
        which its request is aborted. at_once: requests in flight.
        """
        answers: list[dict[str, Any]] = [{} for _ in prompts]
        waiting = list(enumerate(prompts))[::-1]

        async def work() -> None:
            while waiting:
                index, prompt = waiting.pop()
                after = (cancel or {}).get(str(index))
                answers[index] = await self._serve(prompt, max_tokens, after)

        async def serve_all() -> None:
            await asyncio.gather(*(work() for _ in range(at_once)))

        self._run(serve_all())
        return {"answers": answers}

    async def _serve(self, prompt: list[int], max_tokens: int, after: int | None) -> dict[str, Any]:
        self.requests += 1
        name = f"request-{self.requests}"
        greedy = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        stream = await self.sglang.async_generate(
            input_ids=prompt, sampling_params=greedy, rid=name, stream=True
        )
        tokens: list[int] = []
        meta: dict[str, Any] = {}
        if after == 0:
            asyncio.get_running_loop().call_soon(self.sglang.tokenizer_manager.abort_request, name)
        async for chunk in stream:
            meta = chunk["meta_info"]
            found = chunk["output_ids"]
            count = meta["completion_tokens"]
            tokens = found if len(found) >= count else tokens + found
            if after and len(tokens) >= after:
                self.sglang.tokenizer_manager.abort_request(name)
        done = (meta.get("finish_reason") or {}).get("type") == "length"
        details = meta.get("cached_tokens_details") or {}
        return {
            "tokens": tokens if done else None,
            "cached": meta.get("cached_tokens"),
            "sources": {name: details.get(name, 0) for name in ("device", "host", "storage")},
        }

    def _when_idle(self, call: Callable[[], Any]) -> Any:
        """The answer of SGLang to a call that it refuses until it has nothing to do, which it has
        for a moment after the last token."""
        until = time.monotonic() + IDLE
        while True:
            found = call()
            reason = getattr(found, "message", "")
            refused = not found.success and (not reason or NOT_IDLE in reason)
            if not refused or time.monotonic() >= until:
                return found
            time.sleep(0.05)

    def flush(self) -> dict[str, Any]:
        """Drop the device pool and the host pool."""
        return {"flushed": bool(self._when_idle(self.sglang.flush_cache).success)}

    def clear_storage(self) -> dict[str, Any]:
        """Empty the storage."""
        manager = self.sglang.tokenizer_manager
        found = self._when_idle(lambda: self._run(manager.clear_hicache_storage()))
        return {"cleared": found.success}

    def detach(self) -> dict[str, Any]:
        """Close the storage."""
        manager = self.sglang.tokenizer_manager
        return _outcome(self._when_idle(lambda: self._run(manager.detach_hicache_storage())))

    def attach(self, backend: str, extra: dict[str, Any]) -> dict[str, Any]:
        """Open a storage."""
        manager = self.sglang.tokenizer_manager
        settings = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": json.dumps(extra),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        return _outcome(
            self._when_idle(lambda: self._run(manager.attach_hicache_storage(**settings)))
        )

    def close(self) -> dict[str, Any]:
        """Shut the engine down."""
        self.sglang.shutdown()
        self.sglang = None
        return {}


def _outcome(found: Any) -> dict[str, Any]:
    return {"success": bool(found.success), "message": str(found.message)}


if __name__ == "__main__":
    from answer_lines import answer_on_output

    answer_on_output(Engine())
