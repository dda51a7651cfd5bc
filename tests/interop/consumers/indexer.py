"""Dynamo's standalone indexer: an HTTP server over `dynamo._core.run_kv_indexer`. It listens on
every interface."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.interop.consumers.base import MODEL, Index, Source, held_of
from tests.interop.environments import Environments, InteropError
from tests.interop.processes import Child, wait_until
from tests.interop.truth import Answer
from tests.interop.workload import BLOCK, Prompt

BlockHashes = Callable[[Sequence[Prompt]], list[list[int]]]


class Indexer(Index):
    """The indexer in a child process. block_hashes: Dynamo's hashes of prompts, for those with
    media, which it takes by hash only."""

    name = "Dynamo standalone indexer"

    def __init__(
        self,
        environments: Environments,
        folder: Path,
        block_hashes: BlockHashes,
        port: int = 8090,
        threads: int = 1,
    ) -> None:
        self.port = port
        self._block_hashes = block_hashes
        command = [
            environments.program("dynamo"),
            "-m",
            "dynamo.indexer",
            "--port",
            str(port),
            "--threads",
            str(threads),
        ]
        self.child = Child(
            self.name, command, folder / f"indexer-{port}.log", env={"NO_COLOR": "1"}
        )
        wait_until(f"{self.name} answers", self._answers)

    def _answers(self) -> bool:
        self.child.check()
        try:
            self.http("GET", "/health")
        except OSError:
            return False
        return True

    def http(self, method: str, path: str, body: Any = None) -> Any:
        """One request; InteropError for an answer that is an error."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(
                method,
                path,
                json.dumps(body) if body is not None else None,
                {"content-type": "application/json"},
            )
            response = connection.getresponse()
            data = response.read()
            if response.status >= 300:
                raise InteropError(f"{self.name}: {path}: {response.status} {data[:300]!r}")
            return json.loads(data) if data else None
        finally:
            connection.close()

    def register(self, *sources: Source) -> None:
        """See `Index.register`."""
        for source in sources:
            body = {
                "instance_id": source.worker,
                "dp_rank": source.rank,
                "endpoint": source.endpoint,
                "replay_endpoint": source.replay_endpoint,
                "model_name": MODEL,
                "block_size": BLOCK,
            }
            self.http("POST", "/register", body)

    def held(self, source: Source) -> dict[str, set[int]]:
        """See `Index.held`."""
        return held_of(self.http("GET", "/dump"), source)

    def answers(self, source: Source, prompts: Sequence[Prompt]) -> list[Answer]:
        """See `Index.answers`."""
        hashes = self._block_hashes([prompt for prompt in prompts if prompt.media])
        with_media = iter(hashes)
        return [
            self._answer(source, prompt, next(with_media) if prompt.media else None)
            for prompt in prompts
        ]

    def _answer(self, source: Source, prompt: Prompt, hashes: list[int] | None) -> Answer:
        if hashes is None:
            body = {
                "model_name": MODEL,
                "token_ids": prompt.tokens,
                "lora_name": prompt.lora,
                "cache_salt": prompt.salt,
            }
            found = self.http("POST", "/query", body)
        else:
            signed = [number - (1 << 64) if number >> 63 else number for number in hashes]
            found = self.http(
                "POST", "/query_by_hash", {"model_name": MODEL, "block_hashes": signed}
            )
        summary = found["instances"].get(
            str(source.worker), {"dp": {}, "gpu": 0, "cpu": 0, "disk": 0}
        )
        if set(summary["dp"]) <= {str(source.rank)}:
            device, host, storage = summary["gpu"], summary["cpu"], summary["disk"]
            return Answer(device // BLOCK, (host - device) // BLOCK, (storage - host) // BLOCK)
        return Answer(
            summary["dp"].get(str(source.rank), 0) // BLOCK, -1, -1
        )  # it sums up the lower tiers of all ranks

    def close(self) -> None:
        """End the indexer."""
        self.child.close()
