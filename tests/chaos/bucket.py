"""An S3 server is killed and started again empty, and stopped for a while, under load."""

from __future__ import annotations

import os

import anyio
from anyio.to_thread import run_sync

from tests.chaos.mooncake import under_load
from tests.chaos.record import Setting, Tally
from tests.support.injectors import FaultyS3
from tests.support.s3 import CREDENTIALS


async def run(setting: Setting, tally: Tally) -> None:
    """As of a Mooncake pool: blocks are misses until the server is back."""
    try:
        import moto  # noqa: F401
    except ImportError as error:
        tally.unavailable(f"there is no S3 server ({error}): pip install 'moto[server]'")
        return
    server, before = FaultyS3(), dict(os.environ)
    os.environ.update(CREDENTIALS)
    try:
        await run_sync(server.start)
        await under_load(server, server.storage(timeout_s=3.0), setting, tally)
    finally:
        with anyio.CancelScope(shield=True):
            await run_sync(server.kill)
        os.environ.clear()
        os.environ.update(before)
