"""A real Valkey or Redis server on this machine, in its own folder. It can be killed, stopped and
started again at the same address."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

from tests.support.masters import PATIENCE, Master, free_port

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
MISSING = "no Valkey server is installed (Debian: apt-get install redis-server)"


class ValkeyServer(Master):
    """A server process that keeps nothing on disk. options: of its command line."""

    def __init__(self, folder: str, *options: str) -> None:
        super().__init__(*options)
        self.folder = Path(folder)

    @property
    def url(self) -> str:
        return f"valkey://{self.address}"

    @property
    def socket(self) -> Path:
        return self.folder / "server.sock"

    @property
    def command(self) -> list[str]:
        assert PROGRAM is not None, MISSING
        ends = {"--save": "", "--appendonly": "no", "--bind": self._host, "--port": str(self.port)}
        ends |= {"--dir": str(self.folder), "--unixsocket": str(self.socket), "--logfile": "log"}
        return [PROGRAM, *(part for pair in ends.items() for part in pair), *self._flags]

    def client(self) -> Any:
        import redis  # the core tests run without it

        return redis.Redis(unix_socket_path=str(self.socket), protocol=2)

    def signal(self, number: Signals) -> None:
        """Returns once SIGSTOP has stopped it."""
        super().signal(number)
        assert self.process is not None
        state = Path(f"/proc/{self.process.pid}/stat")
        while number == Signals.SIGSTOP and state.read_text().split()[2] != "T":
            time.sleep(0.01)


@contextmanager
def valkey_server(*options: str) -> Iterator[ValkeyServer]:
    """One that runs while the block does."""
    with tempfile.TemporaryDirectory() as folder:
        one = ValkeyServer(folder, *options)
        one.start()
        try:
            yield one
        finally:
            one.kill()


@contextmanager
def valkey_cluster(nodes: int, *options: str) -> Iterator[list[ValkeyServer]]:
    """Servers that share the slots of a cluster."""
    with ExitStack() as stack:
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *options)
        buses = [str(free_port()) for _ in range(nodes)]
        made = (valkey_server(*flags, "--cluster-port", bus) for bus in buses)
        servers = [stack.enter_context(one) for one in made]
        meet = ("CLUSTER MEET", "127.0.0.1", servers[0].port, buses[0])
        for number, server in enumerate(servers):
            first, end = (16384 * (number + i) // nodes for i in (0, 1))
            server.client().execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
            server.client().execute_command(*meet)
        until = time.monotonic() + PATIENCE
        while not all(is_whole(server, nodes) for server in servers):
            assert time.monotonic() < until, "the cluster does not form"
            time.sleep(0.05)
        yield servers


def is_whole(server: ValkeyServer, nodes: int) -> bool:
    with server.client() as client:
        info: dict[str, str] = client.execute_command("CLUSTER INFO")
    found = (info["cluster_state"], info["cluster_slots_assigned"], info["cluster_size"])
    return found == ("ok", "16384", str(nodes))
