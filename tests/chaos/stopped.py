"""SIGSTOP of the process for a while, in the middle of anything, then SIGCONT."""

from __future__ import annotations

from anyio.to_thread import run_sync

from kvactors.testing.faults import Fault
from kvactors.testing.plan import carry_out
from tests.chaos.record import Setting, Tally
from tests.chaos.rest import compare_lines, jsonl, settings, varied
from tests.chaos.worker import worker


async def run(setting: Setting, tally: Tally) -> None:
    """Stop the process a few times. Nothing is wrong, lost or left over afterwards."""
    lines = setting.folder / "lines"
    mapping = varied(settings(setting.folder / "store", jsonl(lines), capacity_blocks=120), setting)
    async with worker(mapping, setting, tally) as life:
        for _ in range(setting.times(2, 5)):
            await setting.moment(0.05, 1.0)
            stop = Fault("process_stop", duration=setting.seconds(0.2, 2.0))
            await carry_out(life, stop)
        await setting.moment(0.05, 1.0)
        said = await life.rest()
        await run_sync(compare_lines, lines, said.truth(), tally)
