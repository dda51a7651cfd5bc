"""Runs a fleet: nodes in separate processes that share one Mooncake pool.

A driver in a separate process (`driver`) serves the workload on its nodes (`node`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from signal import Signals
from typing import Any

import anyio
import msgspec

from kvactors.errors import ConfigError
from kvactors.scenario.report import Progress, Totals
from tests.fleet.spec import FleetReport
from tests.support.child import start_child

FLEET = Path(__file__).with_name("fleet.toml")
"""The scenario."""

# -- The network of a fleet: a namespace for each node, joined by a bridge.
#
# The bridge is in the namespace of this process, which `isolated` makes. Where namespaces are not
# permitted, all nodes are on loopback, each with another address.


BRIDGE = "kvbridge"


class NetworkError(Exception):
    """A command of the network failed."""


def run(*command: str) -> None:
    """Run a command. NetworkError with its message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")


def isolation() -> list[str]:
    """The start of a command that runs the rest of it in new network and process namespaces, which
    end with it, and with the process that starts it. Empty where that is not permitted, or without
    a bridge."""
    if not all(map(shutil.which, ("setpriv", "unshare", "ip"))):
        return []
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    # `--kill-child` ends the namespaces with `unshare`, which a kill of its parent does not end.
    prefix = ["setpriv", "--pdeathsig", "KILL", "unshare", *user]
    prefix += ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        run(*prefix, "ip", "link", "add", "name", BRIDGE, "type", "bridge")
    except (NetworkError, OSError, subprocess.TimeoutExpired):
        return []
    return prefix


class Network:
    """Addresses and links of a fleet's processes. hub: the address of the master."""

    def __init__(self, *, isolated: bool) -> None:
        self.isolated = isolated
        self.hub = "10.77.0.1" if isolated else "127.0.0.1"
        self.prefix = ["unshare", "--net"] if isolated else []  # of the command of a node
        if isolated:
            run("ip", "link", "set", "lo", "up")
            run("ip", "link", "add", "name", BRIDGE, "type", "bridge")
            run("ip", "addr", "add", f"{self.hub}/24", "dev", BRIDGE)
            run("ip", "link", "set", BRIDGE, "up")

    def address(self, node: int) -> str:
        return f"10.77.0.{10 + node}" if self.isolated else f"127.0.0.{10 + node}"

    def attach(self, node: int, pid: int) -> list[list[str]]:
        """Connect the namespace of a node's process to the bridge. Returns commands to run in
        it."""
        if not self.isolated:
            return []
        outer, inner = f"kvhub{node}", f"kvnode{node}"
        with suppress(NetworkError):  # a killed node's link goes with its namespace, a bit later
            run("ip", "link", "del", outer)
        # The same hardware address after a restart: neighbours keep the earlier one for a minute.
        hardware = ["address", f"02:00:00:77:00:{node:02x}"]
        run("ip", "link", "add", "name", outer, "type", "veth", "peer", "name", inner, *hardware)
        run("ip", "link", "set", outer, "master", BRIDGE, "up")
        run("ip", "link", "set", inner, "netns", str(pid))
        return [
            ["ip", "link", "set", "lo", "up"],
            ["ip", "addr", "add", f"{self.address(node)}/24", "dev", inner],
            ["ip", "link", "set", inner, "up"],
        ]

    def slow(self, node: int, mbit_per_s: float) -> bool:
        """Limit the link to a node, and delay it where the kernel has netem. False where that is
        not possible."""
        rate = f"{mbit_per_s}mbit"
        for shape in (
            ["netem", "delay", "20ms", "rate", rate],
            ["tbf", "rate", rate, "burst", "64kb", "latency", "2s"],
        ):
            with suppress(NetworkError, OSError):
                if self.isolated:
                    run("tc", "qdisc", "replace", "dev", f"kvhub{node}", "root", *shape)
                    return True
        return False

    def cut(self, node: int) -> bool:
        """Take the link to a node down. False where that is not possible."""
        if self.isolated:
            run("ip", "link", "set", f"kvhub{node}", "down")
        return self.isolated

    def restore(self, node: int) -> None:
        """Remove the limit of a link, and take it up. A link that was made anew has none."""
        for command in ("tc qdisc del dev {} root", "ip link set {} up"):
            with suppress(NetworkError, OSError):
                run(*command.format(f"kvhub{node}").split())


SILENCE_S, END_S = 600.0, 30.0
"""Seconds without a line of the driver, and for the end of its nodes. Only a hang takes as long."""


async def run_fleet(
    data: dict[str, Any], seed: int, progress: Progress, *, isolate: bool = True
) -> FleetReport:
    """Run the scenario of a fleet."""
    missing = [name for name in ("mooncake", "zmq") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a fleet needs the packages mooncake and zmq ({' and '.join(missing)} not found): pip "
            "install '/path/to/kvactors[mooncake,kv-events]'"
        )
    prefix = isolation() if isolate else []
    driver = await start_child("-m", "tests.fleet.driver", prefix=prefix)
    try:
        await driver.send_json({"data": data, "seed": seed, "isolated": bool(prefix)})
        while True:
            line = await driver.receive(SILENCE_S)
            if line.startswith("report "):
                return msgspec.json.decode(line.removeprefix("report "), type=FleetReport)
            progress(msgspec.json.decode(line, type=Totals))
    finally:
        if not prefix:  # nothing else ends the pool's master
            driver.signal(Signals.SIGTERM)
            with anyio.move_on_after(END_S, shield=True):
                await driver.process.wait()
        await driver.kill()
