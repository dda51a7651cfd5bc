"""Injectors of faults into processes."""

from __future__ import annotations

from signal import SIGCONT, SIGSTOP

from anyio.to_thread import run_sync

from kvactors.testing.faults import Fault
from tests.support.child import Child
from tests.support.masters import Master
from tests.support.s3 import S3Server
from tests.support.valkey import ValkeyServer


class ProcessFaults:
    """Injector of the process seam: process_stop (SIGSTOP), process_kill (SIGKILL)."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def inject(self, fault: Fault) -> None:
        if fault.kind == "process_stop":
            self._child.signal(SIGSTOP)
        elif fault.kind == "process_kill":
            await self._child.kill()
        else:
            raise ValueError(f"{fault.kind} is no fault of a process")

    async def recover(self, fault: Fault) -> None:
        """Let a stopped process go on. A killed one is not started again."""
        if fault.kind == "process_stop":
            self._child.signal(SIGCONT)


class FaultyMaster(Master):
    """Injector of a Mooncake master: store_down (SIGKILL), store_hang (SIGSTOP)."""

    async def inject(self, fault: Fault) -> None:
        if fault.kind == "store_down":
            await run_sync(self.kill)
        elif fault.kind != "store_hang":
            raise ValueError(f"{fault.kind} is no fault of a master")
        else:
            self.signal(SIGSTOP)

    async def recover(self, fault: Fault) -> None:
        """A killed master is started again, empty."""
        if fault.kind == "store_down":
            await run_sync(self.start)
        else:
            self.signal(SIGCONT)


class FaultyS3(S3Server, FaultyMaster):
    """The same of an S3 server."""


class FaultyValkey(ValkeyServer, FaultyMaster):
    """The same of a Valkey server."""
