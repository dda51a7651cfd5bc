"""Ranks in the same loop, behind a relay that delays, holds and cuts the messages between them and
their leader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio

from kvactors.data_plane.ranks.connection import Connection, Listener, connect
from kvactors.data_plane.ranks.leader import RankGroup
from kvactors.data_plane.ranks.worker import serve_rank
from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.layout import make_layout
from kvactors.layout.base import Layout
from kvactors.settings import Config
from kvactors.storage.backend import Backend
from kvactors.testing.faults import Fault, Gate, Latency, instant


class SimDevice(HostDevice):
    """A device whose copies can be refused. failing: how many calls still will be. failed: how many
    were."""

    def __init__(self, layout: Layout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.failing = self.failed = 0

    def _refuse(self) -> None:
        if self.failing:
            self.failing -= 1
            self.failed += 1
            raise OSError("the copy was set to fail")

    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        self._refuse()
        super().copy_to_host(blocks, arena, slots)

    def copy_to_device(
        self, blocks: Sequence[int], arena: Arena, slots: Sequence[int], layers: range | None = None
    ) -> None:
        self._refuse()
        super().copy_to_device(blocks, arena, slots, layers)


def hang_up(group: RankGroup, rank: int) -> None:
    """The leader closes its connection to a rank, if there is one."""
    link = group._ranks[rank].link
    if link is not None:
        link.connection.close()


class SimRank:
    """One rank. config: the leader's, with a memory:// endpoint. latency: seconds of each message.
    store: it outlives a restart, as a disk does, unlike the device and the arena. gate: while it is
    shut, no message goes either way. starts: how often it was started."""

    def __init__(
        self, config: Config, rank: int, *, store: Backend | None = None, latency: Latency = instant
    ) -> None:
        self.config = config
        self.rank = rank
        self.store = store
        self.latency = latency
        self.gate = Gate()
        self.endpoint = f"{config.ranks.endpoint}-{rank}"
        self.device = self._new_device()
        self.starts = self.cuts = 0
        self.serving: asyncio.Task[None] | None = None
        self._connections: list[Connection] = []
        self._listener: Listener | None = None

    def _new_device(self) -> SimDevice:
        return SimDevice(
            make_layout(self.config.layout, self.config.cache.block_size),
            self.config.device.num_blocks,
        )

    async def start(self) -> None:
        """Serve, with empty memory."""
        if self._listener is None:
            self._listener = Listener(self._relay)
            await self._listener.start(self.endpoint)
        self.device = self._new_device()
        self.starts += 1
        count = self.config.ranks.count
        work = serve_rank(
            self.endpoint,
            self.device,
            rank=self.rank,
            ranks=count,
            config=self.config,
            backend=self.store,
            inline_copies=True,
        )
        self.serving = asyncio.get_running_loop().create_task(work, name=f"rank {self.rank}")

    async def stop(self) -> None:
        """The process is killed."""
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def close(self) -> None:
        """Stop, and refuse every further connection."""
        await self.stop()
        self.gate.open()
        self.cut()
        if self._listener is not None:
            await self._listener.stop()
            self._listener = None

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: rank_silent, rank_cut, rank_lost, copy_fail."""
        if fault.kind == "copy_fail":
            self.device.failing += fault.amount
        elif fault.kind == "rank_silent":
            self.gate.close()
        elif fault.kind == "rank_cut":
            self.cut()
        else:
            await self.stop()

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`."""
        if fault.kind != "copy_fail":
            await self.heal()

    async def heal(self) -> None:
        """Let messages through again, and start the rank again if it was stopped."""
        self.gate.open()
        if self.serving is None:
            await self.start()

    def cut(self) -> None:
        """Cut the connection. The rank will connect again."""
        self.cuts += 1
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    async def _relay(self, connection: Connection) -> None:
        try:
            leader = await connect(self.config.ranks.endpoint)
        except OSError:
            connection.close()
            return
        self._connections += [connection, leader]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._pump, connection, leader)
            tasks.start_soon(self._pump, leader, connection)

    async def _pump(self, source: Connection, target: Connection) -> None:
        while (message := await source.receive()) is not None:
            await asyncio.sleep(self.latency())
            await self.gate.passed()
            target.send(message)
        source.close()
        target.close()
