"""A file that remembers what a sink was told, for the process after this one.

It holds JSON lines of three kinds:

["+", start, parent hex, [key hex, ..], [tokens of the complete path, ..]]   these blocks are about
to be told resident ["+own", start, parent hex, [key hex, ..], [tokens of these blocks, ..]]     the
same, of a parent that an earlier line has ["-", [key hex, ..]]
these have been told gone

A last line without its end (a process killed while it wrote) does not count: what it says was not
told yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import aiofiles
import aiofiles.os
import msgspec
import numpy as np

from kvactors.actor.uncancelled import to_the_end
from kvactors.errors import SinkError
from kvactors.files import open_private
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.told import Told
from kvactors.threads import DaemonExecutor
from kvactors.types import KEY_BYTES, split_keys

THREADS = DaemonExecutor("kvactors-journal")

GROWTH = 1 << 20
"""Bytes a journal may grow beyond twice what it held when it was last written anew."""


class Journal:
    """path: the file; its folder must exist. Raises SinkError for whatever the file system says."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._size = 0
        self._limit = GROWTH

    async def read(self, told: Told) -> None:
        """What an earlier process told and did not take back."""
        try:
            if not await aiofiles.os.path.exists(self.path, executor=THREADS):
                async with aiofiles.open(self.path, "ab", opener=open_private, executor=THREADS):
                    return
            async with aiofiles.open(
                self.path, "rb", opener=open_private, executor=THREADS
            ) as file:
                data = await file.read()
        except OSError as error:
            raise SinkError(f"journal {self.path}: {error}") from error
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                replay(told, msgspec.json.decode(line))
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise SinkError(f"journal {self.path}, line {number}: {error}") from error
        self._size = len(data)
        if len(whole) < len(data):
            await self.rewrite(told)

    async def resident(self, tasks: Iterable[FlushTask], told: Told) -> None:
        """Before these tasks are told."""
        await self._append(
            [line_of(t.start_block_idx, t.parent, split_keys(t.keys), t.tokens) for t in tasks],
            told,
        )

    async def gone(self, keys: Sequence[bytes], told: Told) -> None:
        """After these have been told gone."""
        await self._append(
            [msgspec.json.encode(["-", [key.hex() for key in keys]])] if keys else [], told
        )

    async def _append(self, lines: list[bytes], told: Told) -> None:
        if not lines:
            return
        data = b"".join(line + b"\n" for line in lines)
        try:
            await self._write("ab", data)
        except OSError as error:
            raise SinkError(f"journal {self.path}: {error}") from error
        self._size += len(data)
        if self._size > self._limit:
            await self.rewrite(told)

    async def rewrite(self, told: Told) -> None:
        """Write what counts as told anew, in place of all that led to it."""
        lines = [
            line_of(
                node.position,
                node.parent,
                [key],
                told.path_tokens(key) if node.top else node.tokens,
                whole=node.top,
            )
            for key, node in told.nodes.items()
        ]
        lines.append(
            msgspec.json.encode(
                ["-", [key.hex() for key, node in told.nodes.items() if not node.told]]
            )
        )
        data = b"".join(line + b"\n" for line in lines)
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            await self._write("wb", data, fresh)
        except OSError as error:
            raise SinkError(f"journal {self.path}: {error}") from error
        self._size = len(data)
        self._limit = 2 * self._size + GROWTH

    async def _write(
        self, mode: Literal["ab", "wb"], data: bytes, fresh: Path | None = None
    ) -> None:
        """Write the file, or a fresh one in its place; to the end even if the sink's time is up, so
        that no line comes out of turn."""

        async def work() -> None:
            async with aiofiles.open(
                fresh or self.path, mode, opener=open_private, executor=THREADS
            ) as file:
                await file.write(data)
            if fresh is not None:
                await aiofiles.os.replace(fresh, self.path, executor=THREADS)

        await to_the_end(asyncio.get_running_loop().create_task(work()))


def line_of(
    start: int, parent: bytes, keys: Sequence[bytes], tokens: bytes, *, whole: bool = True
) -> bytes:
    """A "+" line. whole: whether the tokens are the complete path, or those of the blocks alone
    (their parent is in an earlier line)."""
    ids = np.frombuffer(tokens, "<u4").tolist()
    return msgspec.json.encode(
        ["+" if whole else "+own", start, parent.hex(), [key.hex() for key in keys], ids]
    )


def replay(told: Told, line: object) -> None:
    """Apply a line. ValueError if it is none, or contradicts an earlier one; then nothing is
    applied."""
    match line:
        case ["-", list(names)]:
            told.gone(hashes(names))
        case ["+" | "+own" as kind, int(start), str(parent), list(names), list(ids)]:
            tokens, keys, above = (
                token_bytes(ids),
                hashes(names),
                hashes([parent] if parent else []),
            )
            first = 0 if kind == "+" else start
            if start < 0 or len(tokens) != (start - first + len(keys)) * told.block_bytes:
                raise ValueError(
                    f"{len(ids)} tokens do not belong to {len(keys)} blocks from block {start} on"
                )
            node = told.nodes.get(above[0]) if above else None
            if node is not None and node.position != start - 1:
                raise ValueError(
                    f"block {start} does not follow its parent, which is block {node.position}"
                )
            if any(
                key in told.nodes and told.nodes[key].position != at
                for at, key in enumerate(keys, start)
            ):
                raise ValueError("a block is at another position than in an earlier line")
            if len(set(keys)) < len(keys):
                raise ValueError("a block is there twice")
            if kind == "+own":
                if node is None:
                    raise ValueError("no earlier line has the parent")
                tokens = told.path_tokens(above[0]) + tokens
            told.add(above[0] if above else b"", start, keys, tokens)
        case _:
            raise ValueError("unknown kind of line")


def hashes(names: list[object]) -> list[bytes]:
    """Block hashes from hex. ValueError for anything else."""
    found = [bytes.fromhex(name) for name in names if isinstance(name, str)]
    if len(found) != len(names) or any(len(one) != KEY_BYTES for one in found):
        raise ValueError(f"a block hash is a string of {2 * KEY_BYTES} hex digits")
    return found


def token_bytes(ids: list[object]) -> bytes:
    """Token ids as little-endian uint32. ValueError for anything else."""
    if not all(type(one) is int and 0 <= one < 1 << 32 for one in ids):
        raise ValueError("token ids are integers below 2**32")
    return np.array(ids, "<u4").tobytes()
