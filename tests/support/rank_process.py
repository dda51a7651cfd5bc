"""Worker processes of tensor-parallel ranks with devices in host memory.

Each process serves its rank and uses its blocks as an engine's worker does: it computes them
(writes a pattern that depends on their names and on the rank) and checks that pattern.
`python -m tests.support.rank_process CONFIG RANK` is such a process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from contextlib import suppress
from signal import SIGCONT, SIGSTOP
from typing import Any, Literal, NamedTuple

import anyio
import msgspec
from msgspec.structs import replace

from kvactors.data_plane.ranks.worker import serve_rank
from kvactors.device.host import HostDevice
from kvactors.errors import KVActorsError
from kvactors.layout import make_layout
from kvactors.settings import Config
from kvactors.settings.ranks import SECRET_VARIABLE
from kvactors.testing.faults import Fault
from tests.support.child import Child, start_child

SILENT, LOST = Fault("rank_silent"), Fault("rank_lost")
"""A rank's process is stopped, and killed."""

ANSWER_LIMIT = 120.0
"""Seconds a worker may take for one command, during some of which it may be stopped."""


class Work(msgspec.Struct, frozen=True):
    """A command: compute these blocks, check them, or set attributes of AttentionStore's
    stand-in in that process (`knobs`), whose only service is that of the rank's shard. keys: 32
    bytes each."""

    kind: Literal["fill", "check", "service"]
    blocks: tuple[int, ...] = ()
    keys: bytes = b""
    knobs: dict[str, Any] = {}


class ServiceState(NamedTuple):
    """A moment's picture of the stand-in in a rank's process. shards: how many of them were
    connected to. objects: pieces that are stored. The others: calls so far."""

    shards: int
    shard: int
    objects: int
    inits: int
    matches: int
    reads: int
    writes: int
    flushes: int


def set_service(knobs: dict[str, Any]) -> ServiceState:
    """Set attributes of this process's services."""
    from tests.support.attentionstore_sdk import services

    for one in services.values():
        vars(one).update(knobs)
    calls = [call.name for one in services.values() for call in one.calls]
    counts = [calls.count(name) for name in ("init", "match", "read", "write", "flush_token_index")]
    return ServiceState(
        len(services),
        min((names[3] for names in services), default=-1),
        sum(len(one.objects) for one in services.values()),
        *counts,
    )


def keys_on_rank(keys: bytes, rank: int) -> bytes:
    """Names of one rank's shares of blocks: no two ranks hold the same bytes."""
    return bytes(byte ^ (rank + 1) if i % 32 == 0 else byte for i, byte in enumerate(keys))


class RankProcess:
    """One rank in its own process. config: the leader's."""

    def __init__(self, config: Config, rank: int) -> None:
        self.config = config
        self.rank = rank
        self._child: Child | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: deque[asyncio.Future[list[int]]] = deque()

    async def start(self) -> None:
        """Start a process with empty memory."""
        ranks = self.config.ranks
        # the secret goes over the environment: a command line is visible to every user
        config = replace(self.config, ranks=replace(ranks, secret=""))
        self._answers = deque()
        self._child = await start_child(
            "-m",
            "tests.support.rank_process",
            msgspec.json.encode(config).decode(),
            str(self.rank),
            environment={SECRET_VARIABLE: ranks.secret} if ranks.secret else None,
        )
        self._reading = asyncio.get_running_loop().create_task(
            self._read(self._child, self._answers)
        )

    async def fill(self, blocks: tuple[int, ...], keys: bytes) -> None:
        """Compute blocks. ConnectionError if the process has ended."""
        await self._do(Work("fill", blocks, keys))

    async def check(self, blocks: tuple[int, ...], keys: bytes) -> list[int]:
        """Indices of blocks that do not hold this rank's share of what their names stand for.
        ConnectionError if the process has ended."""
        return await self._do(Work("check", blocks, keys))

    async def service(self, **knobs: Any) -> ServiceState:
        """Set attributes of the stand-in of AttentionStore that this rank uses. ConnectionError if
        the process has ended."""
        return ServiceState(*await self._do(Work("service", knobs=knobs)))

    async def _do(self, work: Work) -> list[int]:
        if self._child is None or self._reading is None or self._reading.done():
            raise ConnectionError(f"rank {self.rank} does not run")
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        with suppress(KVActorsError):  # the process has ended, so has the answer
            await self._child.send(msgspec.json.encode(work).decode())
        with anyio.fail_after(ANSWER_LIMIT):
            return await answer

    async def _read(self, child: Child, answers: deque[asyncio.Future[list[int]]]) -> None:
        """Answers come in the order of the commands, and end with the process."""
        with suppress(KVActorsError):
            while True:
                line = await child.receive(float("inf"))
                answer = answers.popleft()
                if not answer.done():
                    answer.set_result(msgspec.json.decode(line, type=list[int]))
        for answer in answers:
            if not answer.done():
                answer.set_exception(ConnectionError(f"rank {self.rank} has ended"))

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: rank_silent (SIGSTOP), rank_lost (SIGKILL)."""
        if fault.kind == "rank_lost":
            await self.kill()
        elif fault.kind != "rank_silent":
            raise ValueError(f"{fault.kind} is no fault of a rank's process")
        elif self._child is not None:
            self._child.signal(SIGSTOP)

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`. A lost rank is started again, with empty memory."""
        if fault.kind == "rank_lost":
            await self.start()
        elif self._child is not None:
            self._child.signal(SIGCONT)

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        child, self._child = self._child, None
        if child is not None:
            await child.kill()
        if self._reading is not None:
            await self._reading


async def worker(config: Config, rank: int) -> None:
    """Serve a rank and carry out commands until the input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # prints and logs must not mix with answers
    device = HostDevice(
        make_layout(config.layout, config.cache.block_size), config.device.num_blocks
    )
    serving = asyncio.get_running_loop().create_task(
        serve_rank(
            config.ranks.endpoint, device, rank=rank, ranks=config.ranks.count, config=config
        )
    )
    reader = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    commands = asyncio.get_running_loop().create_task(_commands(reader, device, rank, answers))
    await asyncio.wait((serving, commands), return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    commands.cancel()
    for result in await asyncio.gather(serving, commands, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _commands(
    reader: asyncio.StreamReader, device: HostDevice, rank: int, answers: int
) -> None:
    while line := await reader.readline():
        work = msgspec.json.decode(line, type=Work)
        keys, bad = keys_on_rank(work.keys, rank), []
        if work.kind == "fill":
            device.fill(work.blocks, keys)
        elif work.kind == "check":
            bad = device.check(work.blocks, keys)
        else:
            bad = list(set_service(work.knobs))
        os.write(answers, msgspec.json.encode(bad) + b"\n")


if __name__ == "__main__":
    asyncio.run(worker(msgspec.json.decode(sys.argv[1], type=Config), int(sys.argv[2])))
