"""Dynamo's SelectionService: the program that runs in Dynamo's environment."""

from __future__ import annotations

import asyncio
from typing import Any

from answer_lines import answer_beside_loop
from dynamo._core import SelectionService, compute_block_hash_for_seq


class Selection:
    """The service."""

    def __init__(self) -> None:
        self._service = SelectionService(indexer_threads=1)

    async def register(self, worker: dict[str, Any]) -> Any:
        """Follow the events of a worker."""
        endpoints = worker["kv_events_endpoints"].items()
        ranks = {int(rank): endpoint for rank, endpoint in endpoints}
        return await self._service.upsert_worker(worker | {"kv_events_endpoints": ranks})

    async def held(self) -> Any:
        """The blocks of all workers."""
        return await self._service.indexer_snapshot()

    async def scores(self, requests: list[dict[str, Any]]) -> Any:
        """The blocks of requests, by worker."""
        return [(await self._service.overlap_scores(one))["workers"] for one in requests]

    async def hashes(self, block_size: int, requests: list[dict[str, Any]]) -> Any:
        """Dynamo's hashes of the blocks of requests."""
        return [
            compute_block_hash_for_seq(
                one["token_ids"],
                block_size,
                one["block_mm_infos"],
                one["lora_name"],
                None,
                one["cache_salt"],
            )
            for one in requests
        ]


async def main() -> None:
    """Answer lines until there are none."""
    await answer_beside_loop(Selection())


if __name__ == "__main__":
    asyncio.run(main())
