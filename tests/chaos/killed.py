"""kill -9 of a process with a file store and a file of JSON lines, several times. Then a process on
the same directory that comes to rest."""

from __future__ import annotations

from pathlib import Path

from anyio.to_thread import run_sync

from kvactors.storage.file.table import PAGE, meta_of, scan
from kvactors.storage.inspect import inspect
from kvactors.types import Tier
from tests.chaos.record import Setting, Tally
from tests.chaos.rest import compare_lines, jsonl, settings, varied
from tests.chaos.worker import worker
from tests.support.jsonl import replay_jsonl


async def run(setting: Setting, tally: Tally) -> None:
    """Two to four kills. After each, every block announced as stored is present, and every present
    block is whole."""
    store, lines = setting.folder / "store", setting.folder / "lines"
    mapping = varied(settings(store, jsonl(lines)), setting)
    announced = 0
    for number in range(setting.times(2, 4)):
        early = number > 0 and setting.rng.random() < 0.25
        async with worker(mapping, setting, tally, early=early) as life:
            if not number:
                await life.reach(30)
            await setting.moment(0.05, 2.0)
            await life.killed()
        tally.count("killed while they started", early)
        announced += await run_sync(check_after_kill, store, lines, tally)
    async with worker(mapping, setting, tally) as last:
        await last.reach(0, stored=1)
        await setting.moment(0.1, 0.5)
        said = await last.rest()
        await run_sync(compare_lines, lines, said.truth(), tally)
    if not announced:
        tally.complain("the round proves nothing: no block was announced")
    tally.count("announced blocks looked for after kills", announced)


def check_after_kill(store: Path, lines: Path, tally: Tally) -> int:
    """Check the files that a killed process left. Returns how many blocks it had announced as
    stored."""
    if not lines.exists() or not any(store.rglob("table")):
        return 0
    announced = set(replay_jsonl(lines)[Tier.STORAGE])
    count = len(announced)
    for table in store.rglob("table"):
        raw = table.read_bytes()
        announced -= {one.key for one in scan(raw[PAGE:], meta_of(raw[:PAGE], "")).found}
    if announced:
        tally.complain(f"{len(announced)} of {count} blocks that were announced as stored are gone")
    bad = sum(len(one.bad) for one in inspect(store, verify=True))
    if bad:
        tally.complain(f"{bad} objects of the store are not whole")
    return count
