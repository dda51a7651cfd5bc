"""A real mooncake_master on this machine. It can be killed and started again at the same address."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals

from kvactors.errors import StoreError

PATIENCE = 60.0
"""Seconds until a started master must listen."""


def free_port() -> int:
    """A port of this machine without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Master:
    """A mooncake_master process, bound to 127.0.0.1 since it does not authenticate clients."""

    def __init__(self, *flags: str, host: str = "127.0.0.1") -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self._host = host
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    @property
    def command(self) -> list[str]:
        """The command that runs it. StoreError without Mooncake's package."""
        try:
            import mooncake
        except ImportError as error:
            raise StoreError(
                "mooncake_master comes with pip install '/path/to/kvactors[mooncake]'"
            ) from error
        return [
            str(Path(next(iter(mooncake.__path__))) / "mooncake_master"),
            f"--rpc_address={self._host}",
            f"--rpc_port={self.port}",
            f"--metrics_host={self._host}",
            f"--metrics_port={self.metrics_port}",
            "--client_ttl=3",
            *self._flags,
        ]

    def start(self) -> None:
        """Start it and wait until it listens. StoreError if it cannot be."""
        command = self.command
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((self._host, self.port)) == 0:
                    return
            time.sleep(0.05)
        self.kill()
        raise StoreError(
            f"{command[0]} does not listen (Mooncake's needs Debian's libibverbs1 and libnuma1)"
        )

    def signal(self, number: Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def master(*flags: str) -> Iterator[Master]:
    """One that runs while the block does."""
    one = Master(*flags)
    one.start()
    try:
        yield one
    finally:
        one.kill()
