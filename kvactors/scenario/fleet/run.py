"""Runs a fleet's driver in a separate process, in a network namespace where that is permitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvactors.scenario.child import start_child
from kvactors.scenario.fleet.network import isolation
from kvactors.scenario.report import Report, Totals

PATIENCE = 600.0
"""Seconds without a line of the driver. Only a hang takes as long."""


async def run_fleet(
    data: dict[str, Any], seed: int, progress: Callable[[Totals], None], *, isolate: bool = True
) -> Report:
    """Run the scenario of a fleet.

    Args:
        data: the scenario file's mapping.
        seed: of everything random.
        progress: called with the totals.
        isolate: whether to use network namespaces if they are permitted.
    """
    prefix = isolation() if isolate else []
    driver = await start_child("-m", "kvactors.scenario.fleet.driver", prefix=prefix)
    try:
        task = {"data": data, "seed": seed, "isolated": bool(prefix)}
        await driver.send(msgspec.json.encode(task).decode())
        while True:
            line = await driver.receive(PATIENCE)
            if line.startswith("report "):
                return msgspec.json.decode(line.removeprefix("report "), type=Report)
            progress(msgspec.json.decode(line, type=Totals))
    finally:
        await driver.kill()
