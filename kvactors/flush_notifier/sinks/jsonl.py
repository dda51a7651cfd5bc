"""A sink that appends JSON lines to a file.

One object a line, of two kinds:

{"type": "epoch", "epoch": 1732150000000} {"type": "flush", "epoch": .., "residency": "resident" |
"gone", "tier": "device" | "host" | "storage", "reason": "commit" | .., "start_block_idx": 0,
"count": 2, "keys": [hex, ..], "parent": hex, "num_tokens": 128, "tokens": [..all from the root
on..]}

An epoch line makes everything above it void. The other fields are those of `FlushTask`. Where they
are not empty a line also has "lora", "lora_id" and "salt" of the path, and "media": [[position of a
block in the path, [[media hash as text, offset in the block], ..]], ..]. A line about a group of
layers has the group's name under "group", no parent, and the tokens of its blocks alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
import msgspec
import numpy as np

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.errors import SinkError
from kvactors.files import open_private
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.sinks.kv_wire import identifier
from kvactors.identity import media_items
from kvactors.settings.check import in_bytes
from kvactors.settings.sinks import JsonLinesSinkConfig
from kvactors.threads import DaemonExecutor
from kvactors.types import HASH_BYTES, split_hashes

CHUNK_TOKENS = 16_384
CHUNK_HASHES = 1_024  # values turned into text at a time: between chunks others run
TAIL_BYTES = 65_536  # looked at, at a time, for the end of the last whole line


class JsonLinesSink(Sink):
    """path: appended to by this process alone. Its folder must exist. A new file is readable by
    its user alone (0600), since it holds the tokens of prompts. A line that a crash or a failed
    write cut short is removed before the next is written."""

    def __init__(self, config: JsonLinesSinkConfig, block_size: int) -> None:
        super().__init__(config, block_size)
        self.path = Path(config.path)
        if not self.path.parent.is_dir():
            raise SinkError(f"sink {self.name!r}: {self.path.parent} is not a folder")
        self._encoder = msgspec.json.Encoder()
        self._threads = DaemonExecutor("kvactors-jsonl")
        limit = config.max_bytes
        self._limit = inf if limit is None else in_bytes(limit, "max_bytes")
        self._backups = config.backup_count
        self._full = False
        self._torn = True  # whether the file may end within a line

    takes_groups = True

    async def open(self) -> None:
        try:
            async with aiofiles.open(self.path, "ab", opener=open_private, executor=self._threads):
                pass
        except OSError as error:
            raise SinkError(
                f"sink {self.name!r} cannot write {self.path}: {error.strerror or error}"
            ) from error

    async def begin_epoch(self, epoch: int) -> None:
        await self._append([self._encoder.encode({"type": "epoch", "epoch": epoch})])

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        await self._append([self._encoder.encode(await self._record(task)) for task in tasks])

    async def _record(self, task: FlushTask) -> dict[str, object]:
        tokens = np.frombuffer(task.tokens, "<u4")
        size = HASH_BYTES * CHUNK_HASHES
        hashes = (task.hashes[i : i + size] for i in range(0, len(task.hashes), size))
        chunks = (tokens[i : i + CHUNK_TOKENS] for i in range(0, len(tokens), CHUNK_TOKENS))
        return self._identity(task) | {
            "type": "flush",
            "epoch": task.epoch,
            "residency": task.residency.value,
            "tier": (task.tier.name or "").lower(),
            "reason": task.reason.value,
            "start_block_idx": task.start_block_idx,
            "count": task.count,
            "keys": await self._array([one.hex() for one in split_hashes(part)] for part in hashes),
            "parent": task.parent.hex(),
            "num_tokens": len(tokens),
            "tokens": await self._array(chunk.tolist() for chunk in chunks),
        }

    async def _array(self, parts: Iterable[list[Any]]) -> msgspec.Raw:
        """Parts as one array. Others run between them."""
        encoded = []
        for part in parts:
            encoded.append(self._encoder.encode(part)[1:-1])
            await asyncio.sleep(0)
        return msgspec.Raw(b"[%b]" % b",".join(encoded))

    def _identity(self, task: FlushTask) -> dict[str, object]:
        fields = task.scope._asdict()
        if task.group is not None:
            fields["group"] = task.group.name
        if task.extra_keys:
            fields["media"] = [
                [position, [[identifier(value), offset] for value, offset in media_items(key)]]
                for position, key in task.extra_keys
            ]
        return {name: value for name, value in fields.items() if value is not None}

    async def _append(self, lines: list[bytes]) -> None:
        """A thread cannot be interrupted: a call given up at its deadline ends with its write."""
        data = b"".join(line + b"\n" for line in lines)
        await wait_uncancelled(asyncio.get_running_loop().create_task(self._write(data)))

    async def _write(self, data: bytes) -> None:
        try:
            if self._full:  # before the lines, so that an error here writes none of them
                await self._rotate()
            async with aiofiles.open(
                self.path, "ab", opener=open_private, executor=self._threads
            ) as file:
                if self._torn:
                    await file.truncate(await self._whole_lines())
                self._torn = True
                await file.write(data)
                self._full = await file.tell() >= self._limit
            self._torn = False
        except OSError as error:
            raise SinkError(f"sink {self.name!r}: {error}") from error

    async def _rotate(self) -> None:
        names = [self.path, *(Path(f"{self.path}.{n + 1}") for n in range(self._backups))]
        for old, new in reversed(list(pairwise(names))):
            with suppress(FileNotFoundError):
                await aiofiles.os.replace(old, new, executor=self._threads)
        if not self._backups:
            with suppress(FileNotFoundError):  # another program has removed the file
                await aiofiles.os.unlink(self.path, executor=self._threads)
        self._full = False

    async def _whole_lines(self) -> int:
        async with aiofiles.open(self.path, "rb", executor=self._threads) as file:
            end = await file.seek(0, 2)
            while end:
                start = max(0, end - TAIL_BYTES)
                await file.seek(start)
                found = (await file.read(end - start)).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
        return 0
