"""A Valkey server is killed and started again empty, and stopped for a while, under load."""

from __future__ import annotations

import anyio
from anyio.to_thread import run_sync

from tests.chaos.mooncake import under_load
from tests.chaos.record import Setting, Tally
from tests.support.injectors import FaultyValkey
from tests.support.valkey import MISSING, PROGRAM


async def run(setting: Setting, tally: Tally) -> None:
    """As of a Mooncake pool: blocks are misses until the server is back."""
    if PROGRAM is None:
        tally.unavailable(MISSING)
        return
    memory = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    server = FaultyValkey(str(setting.folder), *memory, "--notify-keyspace-events", "Eex")
    try:
        await run_sync(server.start)
        place = {"url": server.url, "timeout_s": 1.0}
        await under_load(server, {"backend": "valkey", "valkey": place}, setting, tally)
    finally:
        with anyio.CancelScope(shield=True):
            await run_sync(server.kill)
