"""Dynamo's standalone indexer: an HTTP server over `dynamo._core.run_kv_indexer`. It listens on
every interface."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.interop.consumers.base import MODEL, Index, Source, held_of
from tests.interop.environments import Environments
from tests.interop.processes import Child, call, wait_until
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
        self._url = f"http://127.0.0.1:{port}"
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
        wait_until(f"{self.name} answers", lambda: self.child.answers(f"{self._url}/health"))

    def _ask(self, path: str, body: Any = None) -> Any:
        found = call(f"{self._url}/{path}", body)
        return json.loads(found) if found else None

    def register(self, *sources: Source) -> None:
        for source in sources:
            body = {
                "instance_id": source.worker,
                "dp_rank": source.rank,
                "endpoint": source.endpoint,
                "replay_endpoint": source.replay_endpoint,
                "model_name": MODEL,
                "block_size": BLOCK,
            }
            self._ask("register", body)

    def held(self, source: Source) -> dict[str, set[int]]:
        return held_of(self._ask("dump"), source)

    def answers(self, source: Source, prompts: Sequence[Prompt]) -> list[Answer]:
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
            found = self._ask("query", body)
        else:
            signed = [number - (1 << 64) if number >> 63 else number for number in hashes]
            found = self._ask("query_by_hash", {"model_name": MODEL, "block_hashes": signed})
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
