"""A real mooncake_master on a free port of this machine."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

try:
    import mooncake.store  # noqa: F401
except ImportError as error:
    pytest.skip(f"Mooncake's client cannot be loaded (Debian: libibverbs1, libnuma1): {error}", allow_module_level=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Master:
    """A master that can be killed and started again at the same address."""

    def __init__(self, *flags: str) -> None:
        self.port, self.metrics = free_port(), free_port()
        self.flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        import mooncake

        binary = Path(mooncake.__file__).parent / "mooncake_master"
        command = [
            str(binary),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.metrics}",
            "--client_ttl=3",
            *self.flags,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None, "the master ended"
            time.sleep(0.05)
        raise AssertionError("the master does not listen")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def master(*flags: str):
    one = Master(*flags)
    one.start()
    try:
        yield one
    finally:
        one.kill()
