"""A worker of a case: a process with one kvactors cache that serves prompts as it is asked to
(`modules/answer_lines.py`)."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import AsyncExitStack
from typing import Any

import structlog

import kvactors
from kvactors.identity import CacheScope
from kvactors.observe.statistics import residency
from tests.interop.modules.answer_lines import answer_beside_loop

LIMIT = 60.0
"""Seconds within which the cache must come to rest. Only a hang takes as long."""


class Worker:
    """One open cache and the requests that it serves."""

    cache: kvactors.KVCache

    def __init__(self, ends: AsyncExitStack) -> None:
        self._ends = ends
        self.served = 0

    async def open(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Open the cache. Returns the endpoints of its events."""
        config = kvactors.Config.from_mapping(tables)
        self.cache = await self._ends.enter_async_context(kvactors.open(config))
        sink: Any = self.cache.sinks["kv_events"]
        return {"endpoint": sink.endpoint, "replay_endpoint": sink.replay_endpoint}

    async def serve(
        self, prompts: list[dict[str, Any]], lanes: int, seed: int, clears: int = 0
    ) -> dict[str, Any]:
        """Serve prompts, `lanes` at a time. Some are preempted, abandoned or decoded further.
        clears: calls of `clear` in between, under load."""
        queue, refused = prompts[::-1], 0
        clear_at = {len(prompts) * (i + 1) // (clears + 1) for i in range(clears)}

        async def lane(number: int) -> None:
            nonlocal refused
            draw = random.Random(f"{seed} {number}")
            while queue:
                if len(queue) in clear_at:
                    clear_at.discard(len(queue))
                    await self.cache.clear()
                prompt = queue.pop()
                try:
                    await self._serve(prompt, draw)
                except kvactors.NoRoom:
                    refused += 1

        await asyncio.gather(*(lane(number) for number in range(lanes)))
        return {"served": len(prompts) - refused, "refused": refused}

    async def _serve(self, prompt: dict[str, Any], draw: random.Random) -> None:
        lease = await self._acquire(prompt)
        await lease.wait_ready()
        computed = draw.randint(lease.cached_tokens, lease.num_tokens)
        await lease.commit(computed)
        end = draw.random()
        if end < 0.05:
            await lease.preempt(computed)
        elif end < 0.1:
            lease.abandon()
        elif end < 0.15:
            await asyncio.sleep(0)
            await lease.finish()
        else:
            await lease.finish(computed_tokens=lease.num_tokens)

    async def _acquire(self, prompt: dict[str, Any]) -> kvactors.Lease:
        self.served += 1
        return await self.cache.acquire(
            f"request {self.served}",
            prompt["tokens"],
            extra_keys=[tuple(item) for item in prompt["media"]],
            salt=prompt["salt"],
            lora=prompt["lora"],
        )

    async def request(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Serve one prompt to its end. Returns its hits on each tier."""
        lease = await self._acquire(prompt)
        await lease.wait_ready()
        hits, tokens = list(lease.hits), lease.cached_tokens
        await lease.finish(computed_tokens=lease.num_tokens)
        return {"hits": hits, "cached_tokens": tokens}

    async def rest(self) -> dict[str, list[str]]:
        """The block hashes that each tier's owner holds once the cache is idle and its sinks agree
        with it."""
        await self.cache.wait_flushed(LIMIT)
        violated = self.cache.check()
        if violated or self.cache.count_divergent_blocks():
            raise RuntimeError(
                f"at rest: {self.cache.count_divergent_blocks()} blocks diverge; {violated[:3]}"
            )
        return {
            str(tier.name).lower(): [key.hex() for key in keys]
            for tier, keys in residency(self.cache.system).items()
        }

    async def chains(self, prompts: list[dict[str, Any]]) -> list[list[str]]:
        """The block hashes of prompts, computed as in docs/keys.md."""
        return [self._chain(prompt) for prompt in prompts]

    def _chain(self, prompt: dict[str, Any]) -> list[str]:
        size, roots = self.cache.block_size, self.cache.system.roots
        above = CacheScope(roots.model, roots.namespace, prompt["lora"], prompt["salt"]).root(
            roots.fingerprint
        )
        chain = []
        for first in range(0, len(prompt["tokens"]) - size + 1, size):
            extra = b"".join(
                b"\x05"
                + (8 + len(identifier)).to_bytes(4, "little")
                + (offset - first).to_bytes(8, "little", signed=True)
                + identifier.encode()
                for offset, length, identifier in prompt["media"]
                if offset < first + size and offset + length > first
            )
            tokens = b"".join(
                token.to_bytes(4, "little") for token in prompt["tokens"][first : first + size]
            )
            above = hashlib.sha256(
                above + len(extra).to_bytes(4, "little") + extra + tokens
            ).digest()
            chain.append(above.hex())
        return chain

    async def clear(self, storage: bool) -> dict[str, Any]:
        """Clear device and host. storage: and the store."""
        return {"cleared": (await self.cache.clear(storage=storage)).device_blocks}


async def main() -> None:
    """Answer lines until there are none."""
    async with AsyncExitStack() as ends:
        await answer_beside_loop(Worker(ends))


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    asyncio.run(main())
