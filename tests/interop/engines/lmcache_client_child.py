"""A client of LMCache's server that answers lines of JSON: the program that runs in LMCache's
environment, in the place of an engine's worker.

It is the client of `lmcache bench server`: KV cache tensors in this process, which it stores and
retrieves as vLLM's connector does. Every process makes the same tensors.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

TOKENS = 128
"""Tokens of a sequence: four chunks of 32."""
SEQUENCES = 24
SHAPE = f"(2,{SEQUENCES * TOKENS // 16 + TOKENS // 16},16,2,64):float32:4"
"""Keys and values, blocks, tokens of a block, heads, head size, dtype, layers: 128 KiB a chunk."""
LIMIT = 600.0
"""Seconds that an answer of the server may take. It only bounds a hang."""
POLLS = int(LIMIT / 0.05)

helpers._wait_for_result.__defaults__ = (LIMIT, ())
helpers._poll_prefetch_status.__defaults__ = (POLLS, 0.05)


class Client:
    """A worker, and the sequences whose KV cache it has."""

    def __init__(self) -> None:
        self._client: Any = None
        self._tensors: list[torch.Tensor] = []  # as they were made
        self._right: dict[int, list[str]] = {}
        self._requests = 0

    def open(self, rpc: str, http: str) -> dict[str, Any]:
        """Connect to a server and register new tensors. The connection to a server that was killed
        is forgotten."""
        config = BenchConfig(rpc, http, "cpu", "engine_driven", 1, False, TOKENS - 1, SHAPE, 1, 16)
        self._client = ServerBenchClient(config, lambda line: print(line, file=sys.stderr))
        self._client.start()
        self._tensors = [tensor.clone() for tensor in self._live_tensors()]
        if not self._right:
            for sequence in range(SEQUENCES):
                request = self._request(sequence)
                self._right[sequence] = self._checksums(request, request.total_chunks)
        return {"chunks": self._request(0).total_chunks}

    def _live_tensors(self) -> list[torch.Tensor]:
        (worker,) = self._client._workers
        return list(worker.kv_caches.values())

    def _request(self, sequence: int) -> RequestContext:
        self._requests += 1
        name = f"request-{os.getpid()}-{self._requests}"
        found = self._client.create_request(sequence, name, "test")
        if found is None:
            raise RuntimeError("a sequence without a whole chunk")
        return found

    def _checksums(self, request: RequestContext, chunks: int) -> list[str]:
        tokens = chunks * request.chunk_size
        return list(self._client.compute_checksums(request, 0, tokens) or ())

    def _hits(self, request: RequestContext) -> int:
        found = self._client.lookup(request)
        if not found.succeeded:
            raise RuntimeError(f"the look-up fails: {found.error}")
        return int(found.hit_chunks)

    def store(self, sequences: list[int]) -> dict[str, Any]:
        """Store the chunks of sequences that the server has not."""
        for tensor, made in zip(self._live_tensors(), self._tensors, strict=True):
            tensor.copy_(made)  # `fetch` clears blocks
        stored = failed = 0
        for sequence in sequences:
            request = self._request(sequence)
            hits = self._hits(request)
            start = hits * request.chunk_size
            if hits:  # releases what the look-up has locked
                self._client.retrieve(request, 0, start)
            done = self._client.store(request, start, request.num_full_tokens - start)
            if done is not None:
                stored += request.total_chunks - hits
                failed += not done.succeeded
            self._client.end_session(request)
        return {"stored": stored, "failed": failed}

    def fetch(self, sequences: list[int]) -> dict[str, Any]:
        """Retrieve sequences into cleared blocks, and compare checksums."""
        hits = right = 0
        for sequence in sequences:
            request = self._request(sequence)
            self._client.zero_destination(request, 0, request.num_full_tokens)
            found = self._hits(request)
            done = self._client.retrieve(request, 0, found * request.chunk_size)
            if done is not None and done.succeeded:
                hits += found
                checksums = self._checksums(request, found)
                pairs = zip(checksums, self._right[sequence], strict=False)
                right += sum(one == other for one, other in pairs)
            self._client.end_session(request)
        return {"hits": hits, "right": right}

    def close(self) -> dict[str, Any]:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
            self._client = None
        return {}


if __name__ == "__main__":
    from answer_lines import answer_on_output

    answer_on_output(Client())
