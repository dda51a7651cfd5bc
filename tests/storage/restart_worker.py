"""A process with a file store that is killed in the middle of its work: `python restart_worker.py
FOLDER POLICY`."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import kvactors
from tests.storage.test_restart_announces import config, prompts, serve


async def main(folder: str, policy: str) -> None:
    rng = random.Random(7)
    async with kvactors.open(config(folder, policy=policy)) as cache:
        for turn in range(1_000_000):
            await serve(cache, str(turn), rng.choice(prompts()))
            if cache.statistics().store.writes > 60:
                print("ready", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
