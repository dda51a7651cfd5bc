"""The router of a scenario: another process that mirrors this node from its KV events alone."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from kvactors.errors import DeadlineExceeded, KVActorsError
from kvactors.scenario.spec import RouterSpec

PATIENCE = 60.0
"""Seconds for an answer of a child process."""


class Child:
    """A child process that is spoken to in lines."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def say(self, line: str) -> None:
        """One line to its input."""
        await self.process.stdin.send(line.encode() + b"\n")

    async def hear(self, seconds: float = PATIENCE) -> str:
        """One line of its output. DeadlineExceeded, or KVActorsError if it has ended."""
        try:
            with anyio.fail_after(seconds):
                return (await self._lines.receive_until(b"\n", 1 << 30)).decode()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"child process {self.process.pid} said nothing for {seconds} s"
            ) from error
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.ClosedResourceError) as error:
            raise KVActorsError(
                f"child process {self.process.pid} ended, status {self.process.returncode}"
            ) from error


@asynccontextmanager
async def child(*arguments: str, folder: Path | None = None) -> AsyncIterator[Child]:
    """Run this Python with `arguments`; the process is killed on the way out.

    Args:
        arguments: of the interpreter, for example `-m` and a module.
        folder: the working directory, from which modules are imported as well. By default the
            process imports from where this one does, whatever its working directory is.
    """
    isolated = [] if folder else ["-P"]
    process = await anyio.open_process(
        [sys.executable, *isolated, *arguments], stderr=None, cwd=folder
    )
    try:
        yield Child(process)
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.wait()
            await process.aclose()


@asynccontextmanager
async def routing(
    spec: RouterSpec, endpoint: str, replay: str, topic: str, seed: int
) -> AsyncIterator[Child]:
    """A router process, connected."""
    arguments = (
        "-m",
        "kvactors.testing.kv_mirror",
        endpoint,
        replay,
        "--topic",
        topic,
        "--lose",
        str(spec.lose),
    )
    async with child(*arguments, "--follow", spec.follow, "--seed", str(seed)) as router:
        await router.hear()
        yield router


async def compare(router: Child, sequence: int, truth: Mapping[str, set[int]]) -> dict[str, int]:
    """What the router reports once it has read every batch before `sequence`. divergence: blocks on
    which it differs from the truth, by medium. ambiguous: blocks that it cannot tell apart by
    tokens, adapter, salt and media."""
    await router.say(f"report {sequence}")
    said = msgspec.json.decode(await router.hear())
    view = {medium: set(hashes) for medium, hashes in said["view"].items()}
    differing = sum(
        len(view.get(medium, set()) ^ truth.get(medium, set()))
        for medium in view.keys() | truth.keys()
    )
    behind = max(0, sequence - said["sequence"])
    return {
        "divergence": differing,
        "ambiguous": said["ambiguous"],
        "behind": behind,
        **said["statistics"],
    }
