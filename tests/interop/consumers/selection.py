"""Dynamo's SelectionService: the index inside Dynamo's router, without its runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.consumers.base import MODEL, Index, Source, dynamo_request, held_of
from tests.interop.environments import Environments
from tests.interop.processes import Child
from tests.interop.truth import Answer
from tests.interop.workload import BLOCK, Prompt

CHILD = Path(__file__).with_name("selection_child.py")


class Selection(Index):
    """The service in a child process. It follows a replay endpoint only for workers with one
    rank."""

    name = "Dynamo SelectionService"

    def __init__(self, environments: Environments, folder: Path) -> None:
        self.child = Child(
            self.name,
            [environments.program("dynamo"), "-P", str(CHILD)],
            folder / "selection.log",
            lines=True,
        )

    def register(self, *sources: Source) -> None:
        first = sources[0]
        worker: dict[str, Any] = {
            "worker_id": first.worker,
            "model_name": MODEL,
            "endpoint": "http://127.0.0.1:9",
            "kv_events_endpoints": {source.rank: source.endpoint for source in sources},
            "block_size": BLOCK,
            "data_parallel_size": len(sources),
            "max_num_batched_tokens": 8192,
        }
        if len(sources) == 1:
            worker |= {
                "replay_endpoint": first.replay_endpoint,
                "data_parallel_start_rank": first.rank,
            }
        self.child.ask({"do": "register", "worker": worker})

    def held(self, source: Source) -> dict[str, set[int]]:
        return held_of(self.child.ask({"do": "held"}), source)

    def answers(self, source: Source, prompts: Sequence[Prompt]) -> list[Answer]:
        scores = self.child.ask(
            {"do": "scores", "requests": [dynamo_request(prompt) for prompt in prompts]}
        )
        return [self._answer(source, workers) for workers in scores]

    def _answer(self, source: Source, workers: list[dict[str, Any]]) -> Answer:
        for one in workers:
            if (one["worker_id"], one["dp_rank"]) == (source.worker, source.rank):
                return Answer(
                    one["device_blocks"],
                    one["host_pinned_extension_blocks"],
                    one["disk_extension_blocks"],
                )
        return Answer(0, 0, 0)

    def block_hashes(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Dynamo's own hashes of the blocks of prompts, which the standalone indexer takes in place
        of tokens."""
        requests = [dynamo_request(prompt) for prompt in prompts]
        return list(self.child.ask({"do": "hashes", "block_size": BLOCK, "requests": requests}))

    def close(self) -> None:
        """End the service."""
        self.child.close()
