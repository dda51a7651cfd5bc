"""Mooncake masters that etcd elects: joining by an etcd:// address, a kill of the elected one,
and leaving without one."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest

from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.storage.header import HEADER
from kvactors.storage.messages import Outcome
from kvactors.storage.mooncake import MooncakeBackend
from kvactors.storage.mooncake_client import MooncakeClient
from tests.interop.environments import InteropError
from tests.interop.processes import call, wait_until
from tests.support.masters import Master, free_port

pytestmark = pytest.mark.interop

LIMIT = 100.0
"""Seconds within which a server must answer. Only a hang takes as long."""
SIZE = 40_000


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def healthy(url: str) -> bool:
    try:
        return b'"true"' in call(f"{url}/health", limit=5.0)
    except OSError:
        return False


@contextmanager
def etcd(folder: Path) -> Iterator[int]:
    """An etcd server. Gives the port of its clients."""
    program = shutil.which("etcd")
    if program is None:
        raise InteropError("there is no etcd (Debian: etcd-server)")
    port, peers = free_port(), free_port()
    clients, own = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    command = [program, "--data-dir", str(folder / "etcd")]
    command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
    command += ["--listen-peer-urls", own, "--initial-advertise-peer-urls", own]
    command += ["--initial-cluster", f"default={own}"]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until("etcd answers", lambda: healthy(clients), LIMIT)
            yield port
        finally:
            process.kill()
            process.wait()


class Candidate(Master):
    """A master that takes part in an election. It listens when it is elected."""

    def launch(self) -> None:
        """Start it. It need not be elected."""
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    @property
    def elected(self) -> bool:
        """Whether it serves."""
        return self.process is not None and accepts(self.port)


@contextmanager
def candidates(port: int) -> Iterator[list[Candidate]]:
    """Two masters, one of them elected."""
    flags = ("--enable_ha=true", f"--etcd_endpoints=127.0.0.1:{port}")
    made = [Candidate(*flags) for _ in range(2)]
    try:
        for one in made:
            one.launch()
        wait_until("a master is elected", lambda: any(one.elected for one in made), LIMIT)
        yield made
    finally:
        for one in made:
            one.kill()


def backend(port: int) -> MooncakeBackend:
    config = MooncakeConfig(
        master_server_address=f"etcd://127.0.0.1:{port}",
        local_hostname="127.0.0.1",
        global_segment_size="64MB",
        local_buffer_size="16MB",
        timeout_s=1.0,
        connect_timeout_s=60.0,
    )
    return MooncakeBackend(MooncakeClient(config), StoreIdentity("m", "n", bytes(range(32))), SIZE)


def test_objects_are_stored_again_after_another_master_is_elected(tmp_path: Path) -> None:
    """The elected master is killed. The other one's index is empty, calls fail until then, and no
    byte is wrong. Then every master ends: the client is left open, since closing it would block the
    process for half a minute."""
    arena = Arena(4, SIZE, trailer=HEADER.size)
    keys = [bytes([number]) * 32 for number in range(4)]
    views = [arena.view(slot) for slot in range(4)]
    bodies = [np.random.default_rng(number).bytes(SIZE) for number in range(4)]

    async def write(pool: MooncakeBackend) -> list[int]:
        for view, body in zip(views, bodies, strict=True):
            view[:] = body
        return list((await pool.write(keys, views, lambda: False)).outcomes)

    async def read(pool: MooncakeBackend) -> list[int]:
        for view in views:
            view[:] = bytes(SIZE)
        outcomes = list((await pool.read(keys, views, lambda: False)).outcomes)
        for view, body, outcome in zip(views, bodies, outcomes, strict=True):
            assert (bytes(view) == body) == (outcome == Outcome.OK)
        return outcomes

    async def run(port: int, masters: list[Candidate]) -> None:
        pool = backend(port)
        await pool.open()
        await pool.attach(arena)
        assert await write(pool) == [Outcome.OK] * 4
        assert await read(pool) == [Outcome.OK] * 4
        next(one for one in masters if one.elected).kill()
        begun, failed = time.monotonic(), 0
        with anyio.fail_after(LIMIT):
            while await write(pool) != [Outcome.OK] * 4:
                failed += 1
                await asyncio.sleep(0.2)
        print(f"stored again {time.monotonic() - begun:.1f} s after the kill, {failed} failed")
        assert failed
        assert await read(pool) == [Outcome.OK] * 4
        for one in masters:
            one.kill()
        with anyio.fail_after(LIMIT):
            while await read(pool) != [Outcome.UNAVAILABLE] * 4:
                await asyncio.sleep(0.2)
        closing = asyncio.create_task(pool.close())
        worst = 0.0
        while not closing.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            worst = max(worst, time.monotonic() - before)
        assert worst < 3.0, "the client's own close holds the interpreter for 5 to 29 s"

    with etcd(tmp_path) as port, candidates(port) as masters:
        asyncio.run(run(port, masters))
    arena.close()


def test_without_an_elected_master_joining_fails_at_once(tmp_path: Path) -> None:
    """etcd answers, and names no master."""

    async def run(port: int) -> None:
        with pytest.raises(StoreError, match=rf"etcd://127\.0\.0\.1:{port} refused .* code -1"):
            await backend(port).open()

    with etcd(tmp_path) as port:
        asyncio.run(run(port))
