"""A model of three kinds of layers (full attention, a window, a state) whose bytes are a digest of
the tokens that they were computed from: a pass checks what it reads, as attention would use it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

import kvactors
from kvactors.flush_notifier.sinks import Sink
from kvactors.testing.sim import problems_at_rest
from tests.support.cache import BLOCK, Table

WIDTH = 2
"""float64 values of a token and of a state."""

WINDOW = 10
"""Tokens: not a multiple of BLOCK."""

TOKENS = {"kind": "gqa", "num_layers": 1, "num_kv_heads": 1, "head_dim": 2 * WIDTH}
TOKENS |= {"dtype": "float32"}
STATE = {"kind": "state", "num_layers": 1}
STATE |= {"options": {"ssm": {"shape": [2 * WIDTH], "dtype": "float32"}}}


def window(blocks: int, *, slots: int = 0, tokens: int = WINDOW) -> dict[str, Any]:
    return {
        "name": "window",
        "kind": "window",
        "window": tokens,
        "layout": TOKENS,
        "num_blocks": blocks,
        "slots": slots,
    }


def state(blocks: int, *, slots: int = 0, every: int = 2) -> dict[str, Any]:
    return {
        "name": "state",
        "kind": "state",
        "every": every,
        "layout": STATE,
        "num_blocks": blocks,
        "slots": slots,
    }


def config(groups: Sequence[Table], *, device: int = 24, **tables: Any) -> kvactors.Config:
    cache = {"model": "layers", "block_size": BLOCK, "groups": list(groups)}
    return kvactors.Config.from_mapping(
        {
            "cache": {**cache, **tables.pop("cache", {})},
            "device": {"num_blocks": device, **tables.pop("device_table", {})},
            "layout": TOKENS,
            **tables,
        }
    )


@asynccontextmanager
async def opened(
    groups: Sequence[Table], sinks: Sequence[Sink] = (), *, inline: bool = False, **options: Any
) -> AsyncIterator[Any]:
    settings = config(groups, **options)
    async with kvactors.open(settings, sinks=sinks, inline_copies=inline) as cache:
        yield cache
        assert await problems_at_rest(cache, 10) == []
        for one in cache.groups.values():
            assert await problems_at_rest(one, 10) == []


def digest(tokens: Sequence[int], kind: str) -> bytes:
    data = np.asarray(tokens, np.uint32).tobytes()
    return hashlib.blake2b(data, digest_size=16, person=kind.encode()).digest()


class Model:
    """Computes passes into the device blocks of a cache, and checks what each pass reads."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.groups = cache.config.cache.groups

    def compute(self, lease: Any, tokens: Sequence[int], start: int, stop: int) -> None:
        """A pass over tokens [start, stop) of a request."""
        caches = [self.cache, *self.cache.groups.values()]
        for cache, group, table in zip(
            caches, (None, *self.groups), lease.block_tables, strict=True
        ):
            kind = "full" if group is None else group.name
            rows = cache.device.region(0, "ssm" if group and group.kind == "state" else "key")
            if group and group.kind == "state":
                if start:
                    found = rows[table[(start - 1) // BLOCK]].tobytes()
                    assert found == digest(tokens[:start], kind), f"{kind} before token {start}"
                _put(rows[table[(stop - 1) // BLOCK]], digest(tokens[:stop], kind))
                continue
            first = max(0, start - group.window + 1) if group else 0
            for at in range(first, start):
                found = rows[table[at // BLOCK]].reshape(BLOCK, -1)[at % BLOCK].tobytes()
                assert found == digest(tokens[: at + 1], kind), f"{kind} at {at} before {start}"
            for at in range(start, stop):
                row = rows[table[at // BLOCK]].reshape(BLOCK, -1)[at % BLOCK]
                _put(row, digest(tokens[: at + 1], kind))

    async def prefill(self, lease: Any, tokens: Sequence[int], *, chunk: int = 1 << 30) -> None:
        """Compute what is not cached, in passes that end where a state group asks for it."""
        await lease.wait_ready()
        at = lease.cached_tokens
        while at < len(tokens):
            while lease.covered_tokens <= at:
                await lease.next_chunk(chunk)
            end = min(at + chunk, len(tokens), lease.covered_tokens)
            end = lease.pass_end(at, end)
            self.compute(lease, tokens, at, end)
            await lease.commit(end)
            at = end
            await asyncio.sleep(0)  # other requests come between

    async def decode(self, lease: Any, tokens: list[int], new: Sequence[int]) -> None:
        """Append tokens one by one, and compute each."""
        for token in new:
            await lease.extend([token])
            tokens.append(token)
            self.compute(lease, tokens, len(tokens) - 1, len(tokens))
            await lease.commit(len(tokens))

    async def serve(
        self, name: str, tokens: Sequence[int], new: Sequence[int] = (), **options: Any
    ) -> int:
        """Serve a request. Returns its cached tokens."""
        said = list(tokens)
        async with await self.cache.acquire(name, said, **options) as lease:
            await self.prefill(lease, said)
            await self.decode(lease, said, new)
            await lease.finish(len(said))
            return int(lease.cached_tokens)


def _put(row: Any, value: bytes) -> None:
    row[:] = np.frombuffer(value, np.uint8)
