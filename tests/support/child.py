"""Child processes that exchange lines of text with this one."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import Signals
from typing import IO, Any

import anyio
import msgspec
import structlog
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from kvactors.errors import DeadlineExceeded, KVActorsError

ROOT = Path(__file__).parents[2]
"""The working directory of child processes, from which their modules are imported."""

PATIENCE = 60.0
"""Seconds to wait for a line by default."""

LONGEST_LINE = 1 << 30


class Child:
    """A running child process."""

    def __init__(self, process: Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process needs pipes as its standard input and output")
        self.process = process
        self._input = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)

    @property
    def name(self) -> str:
        return f"child process {self.process.pid}"

    async def send(self, line: str) -> None:
        try:
            await self._input.send(line.encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise KVActorsError(f"{self.name} has ended") from error

    async def send_json(self, message: Any) -> None:
        await self.send(msgspec.json.encode(message).decode())

    async def receive(self, deadline: float = PATIENCE) -> str:
        try:
            with anyio.fail_after(deadline):
                return (await self._lines.receive_until(b"\n", LONGEST_LINE)).decode()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.name} printed nothing for {deadline} s") from error
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.ClosedResourceError) as error:
            status = self.process.returncode
            raise KVActorsError(f"{self.name} has ended, exit status {status}") from error

    def signal(self, number: Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process (SIGKILL) and wait until it has ended. No cancellation interrupts it."""
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                with suppress(ProcessLookupError):
                    self.process.kill()
            await self.process.wait()
            await self.process.aclose()


async def start_child(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    errors: IO[bytes] | None = None,
) -> Child:
    """Start a Python process in the repository's root. `Child.kill` ends it."""
    return Child(
        await anyio.open_process(
            [*prefix, sys.executable, *arguments],
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, **environment} if environment else None,
        )
    )


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[Child]:
    """Run a Python process while the block runs, see `start_child`."""
    started = await start_child(*arguments)
    try:
        yield started
    finally:
        await started.kill()


def say(message: Any) -> None:
    """In a child process: print one line of JSON."""
    print(msgspec.json.encode(message).decode(), flush=True)


def log_errors_only() -> None:
    """In a child process: errors alone are logged, to standard error."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
