"""kill -9 of processes that write one folder beside another one, and what a third process finds
there."""

from __future__ import annotations

from pathlib import Path

from anyio.to_thread import run_sync

from kvactors.native import addresses
from kvactors.storage.header import HEADER, PoolHeaders
from kvactors.storage.messages import Outcome
from tests.chaos.record import Setting, Tally
from tests.chaos.rest import settings
from tests.chaos.worker import worker


async def run(setting: Setting, tally: Tally) -> None:
    """Every object that has its name is whole, and a process that writes nothing is served by
    those of the others."""
    folder = setting.folder / "shared"
    folder.mkdir()
    mapping = settings(setting.folder)
    mapping["storage"] = {"backend": "object", "url": f"file://{folder}", "timeout_s": 20.0}
    storing = {**mapping, "storage": {**mapping["storage"], "write_policy": "write_through"}}
    reading = {**mapping, "storage": {**mapping["storage"], "write_policy": "none"}}
    async with worker(storing, setting, tally) as first:
        for _ in range(setting.times(2, 4)):
            async with worker(storing, setting, tally) as other:
                await other.reach(10)
                await setting.moment(0.05, 2.0)
                await other.killed()
            await run_sync(check_objects, folder, tally)
        await first.rest()
    async with worker(reading, setting, tally) as last:
        await last.reach(30, stored=1)
        await last.rest()


def check_objects(folder: Path, tally: Tally) -> None:
    """Compare every object with its header."""
    for path in folder.rglob("???/" + 64 * "?"):
        digest, key = path.parts[-3], path.parts[-1]
        data = memoryview(bytearray(path.read_bytes()))
        size = len(data) - HEADER.size
        [at] = addresses([data])
        headers = PoolHeaders(bytes.fromhex(digest), size, checksums=True)
        outcomes, _ = headers.compare(bytes.fromhex(key), [[at, at + size]], [len(data)])
        tally.count("objects verified after kills", 1)
        if outcomes != bytes([Outcome.OK]):
            tally.complain(f"{path.name} is not whole")
