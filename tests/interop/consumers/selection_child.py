"""Dynamo's SelectionService in a separate process. It runs in Dynamo's environment and answers
lines of JSON with lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from dynamo._core import SelectionService, compute_block_hash_for_seq


async def answer(service: Any, message: dict[str, Any]) -> Any:
    """The answer to one message."""
    kind = message.pop("do")
    if kind == "register":
        worker = message["worker"]
        endpoints = {
            int(rank): endpoint for rank, endpoint in worker.pop("kv_events_endpoints").items()
        }
        return await service.upsert_worker(worker | {"kv_events_endpoints": endpoints})
    if kind == "unregister":
        return await service.delete_worker(message["worker_id"])
    if kind == "held":
        return await service.indexer_snapshot()
    if kind == "scores":
        return [
            (await service.overlap_scores(request))["workers"] for request in message["requests"]
        ]
    if kind == "hashes":
        return [
            compute_block_hash_for_seq(
                one["token_ids"],
                message["block_size"],
                one["block_mm_infos"],
                one["lora_name"],
                None,
                one["cache_salt"],
            )
            for one in message["requests"]
        ]
    raise ValueError(f"no such message: {kind}")


async def main(lines: Any) -> None:
    """Answer lines until there are none."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    service = SelectionService(indexer_threads=1)
    while line := await reader.readline():
        try:
            reply = await answer(service, json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        lines.write(json.dumps(reply) + "\n")
        lines.flush()


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(main(out))
