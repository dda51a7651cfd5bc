"""Scenario of a fleet: nodes in separate processes that share one Mooncake pool.

A driver in a separate process (`fleet.driver`) serves the workload on its nodes (`fleet.node`).
"""

from __future__ import annotations

from importlib.util import find_spec
from signal import Signals
from typing import Any

import anyio
import msgspec

from kvactors.errors import ConfigError
from kvactors.scenario.child import start_child
from kvactors.scenario.fleet.network import isolation
from kvactors.scenario.report import Progress, Report, Totals

SILENCE_S, END_S = 600.0, 30.0
"""Seconds without a line of the driver, and for the end of its nodes. Only a hang takes as long."""


async def run_fleet(
    data: dict[str, Any], seed: int, progress: Progress, *, isolate: bool = True
) -> Report:
    """Run the scenario of a fleet."""
    missing = [name for name in ("mooncake", "zmq") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a fleet needs the packages mooncake and zmq ({' and '.join(missing)} not found): pip "
            "install 'kvactors[mooncake,kv-events]'"
        )
    prefix = isolation() if isolate else []
    driver = await start_child("-m", "kvactors.scenario.fleet.driver", prefix=prefix)
    try:
        await driver.send_json({"data": data, "seed": seed, "isolated": bool(prefix)})
        while True:
            line = await driver.receive(SILENCE_S)
            if line.startswith("report "):
                return msgspec.json.decode(line.removeprefix("report "), type=Report)
            progress(msgspec.json.decode(line, type=Totals))
    finally:
        if not prefix:  # nothing else ends the pool's master
            driver.signal(Signals.SIGTERM)
            with anyio.move_on_after(END_S, shield=True):
                await driver.process.wait()
        await driver.kill()
