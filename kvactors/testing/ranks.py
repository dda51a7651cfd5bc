"""Worker processes of tensor-parallel ranks, for tests of whoever leads them: real ones, with
devices in host memory.

Each serves its rank in its own loop and does, beside that, what an engine's worker does with its
blocks: it computes them (writes a pattern that depends on their names and on the rank) and reads
them (checks that pattern).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import anyio
import msgspec
from msgspec.structs import replace

from kvactors.config import Config
from kvactors.data_plane.ranks.worker import serve_rank
from kvactors.device.host import HostDevice
from kvactors.layout import make_layout
from kvactors.ranks_config import SECRET_VARIABLE

ANSWER_LIMIT = 120.0
"""Seconds a worker may take over one command; it may be stopped for some of them, and the machine
may be busy."""


class Work(msgspec.Struct, frozen=True):
    """A command: compute these blocks, or check them; or set attributes of AttentionStore's
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
    from kvactors.testing.attentionstore_sdk import services

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
    """One rank in a process of its own. config: the leader's."""

    def __init__(self, config: Config, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.process: asyncio.subprocess.Process | None = None
        self._answers: deque[asyncio.Future[list[int]]] = deque()
        self._hearing: asyncio.Task[None] | None = None
        self._deaf = False  # its process has ended

    async def start(self) -> None:
        """A new process with empty memory."""
        ranks = self.config.ranks
        config = replace(
            self.config, ranks=replace(ranks, secret="")
        )  # a command line is visible to every user
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "kvactors.testing.ranks",
            msgspec.json.encode(config).decode(),
            str(self.rank),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, SECRET_VARIABLE: ranks.secret} if ranks.secret else None,
        )
        assert self.process.stdout is not None
        self._answers = deque()
        self._deaf = False
        self._hearing = asyncio.get_running_loop().create_task(
            self._hear(self.process.stdout, self._answers)
        )

    async def fill(self, blocks: tuple[int, ...], keys: bytes) -> None:
        """Compute blocks. ConnectionError if the process has died."""
        await self._do(Work("fill", blocks, keys))

    async def check(self, blocks: tuple[int, ...], keys: bytes) -> list[int]:
        """Indices of blocks that do not hold this rank's share of what their names stand for.
        ConnectionError if the process has died."""
        return await self._do(Work("check", blocks, keys))

    async def service(self, **knobs: Any) -> ServiceState:
        """Set attributes of the stand-in of AttentionStore that this rank uses. ConnectionError if
        the process has died."""
        return ServiceState(*await self._do(Work("service", knobs=knobs)))

    async def _do(self, work: Work) -> list[int]:
        process = self.process
        if process is None or process.stdin is None or self._deaf:
            raise ConnectionError(f"rank {self.rank} does not run")
        body = msgspec.msgpack.encode(work)
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        process.stdin.write(len(body).to_bytes(4, "little") + body)
        with anyio.fail_after(ANSWER_LIMIT):
            return await answer

    async def _hear(
        self, reader: asyncio.StreamReader, answers: deque[asyncio.Future[list[int]]]
    ) -> None:
        """Answers come in the order of their commands; with the process they end."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                result = msgspec.msgpack.decode(await reader.readexactly(size), type=list[int])
                answer = answers.popleft()
                if not answer.done():
                    answer.set_result(result)
        self._deaf = self._deaf or self._answers is answers
        for answer in answers:
            if not answer.done():
                answer.set_exception(ConnectionError(f"rank {self.rank} has died"))

    def signal(self, number: int) -> None:
        """Send a signal, if it still lives."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def kill(self) -> None:
        """Kill -9, and wait for the end."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            await self.process.wait()
            self.process = None
        if self._hearing is not None:
            await self._hearing


async def worker(config: Config, rank: int) -> None:
    """Serve a rank and do the commands that come in, until those end."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed or logged to the standard output is no answer
    device = HostDevice(
        make_layout(config.layout, config.cache.block_size), config.device.num_blocks
    )
    serving = asyncio.get_running_loop().create_task(
        serve_rank(
            config.ranks.endpoint, device, rank=rank, ranks=config.ranks.count, config=config
        )
    )
    reader = asyncio.StreamReader()
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
    with suppress(asyncio.IncompleteReadError):
        while True:
            size = int.from_bytes(await reader.readexactly(4), "little")
            work = msgspec.msgpack.decode(await reader.readexactly(size), type=Work)
            keys, bad = keys_on_rank(work.keys, rank), []
            if work.kind == "fill":
                device.fill(work.blocks, keys)
            elif work.kind == "check":
                bad = device.check(work.blocks, keys)
            else:
                bad = list(set_service(work.knobs))
            body = msgspec.msgpack.encode(bad)
            os.write(answers, len(body).to_bytes(4, "little") + body)


if __name__ == "__main__":
    asyncio.run(worker(msgspec.json.decode(sys.argv[1], type=Config), int(sys.argv[2])))
