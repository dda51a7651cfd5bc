"""A sink that appends JSON lines to a file.

One object a line, of two kinds:

{"type": "epoch", "epoch": 1732150000000} {"type": "flush", "epoch": .., "residency": "resident" |
"gone", "tier": "device" | "host" | "storage", "reason": "commit" | .., "start_block_idx": 0,
"count": 2, "keys": [hex, ..], "parent": hex, "num_tokens": 128, "tokens": [..all from the root
on..]}

An epoch line makes everything above it void. The other fields are those of `FlushTask`. Where they
are not empty a line also has "lora", "lora_id" and "salt" of the path, and "media": [[position of a
block in the path, [[media hash as text, offset in the block], ..]], ..].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from kvactors.actor.uncancelled import uncancelled
from kvactors.errors import SinkError
from kvactors.files import open_private
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.sinks.kv_wire import identifier
from kvactors.identity import media_items
from kvactors.settings.sinks import JsonLinesSinkConfig
from kvactors.threads import in_daemon
from kvactors.types import split_hashes

THREAD = "kvactors-jsonl"
CHUNK_TOKENS = 16_384  # turned into text at a time: in between the loop's thread can run
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
        self._torn = True  # whether the file may end within a line

    async def open(self) -> None:
        try:
            await in_daemon(self._touch, THREAD)
        except OSError as error:
            raise SinkError(
                f"sink {self.name!r} cannot write {self.path}: {error.strerror or error}"
            ) from error

    def _touch(self) -> None:
        open(self.path, "ab", opener=open_private).close()

    async def begin_epoch(self, epoch: int) -> None:
        await self._append([{"type": "epoch", "epoch": epoch}])

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        await self._append(map(record_of, tasks))

    async def _append(self, records: Iterable[dict[str, object]]) -> None:
        """A thread cannot be interrupted: a call given up at its deadline ends with its write."""
        await uncancelled(in_daemon(partial(self._write, records), THREAD))

    def _write(self, records: Iterable[dict[str, object]]) -> None:
        data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        try:
            with open(self.path, "ab", opener=open_private) as file:
                if self._torn:
                    file.truncate(self._whole_lines())
                self._torn = True
                file.write(data)
            self._torn = False
        except OSError as error:
            raise SinkError(f"sink {self.name!r}: {error}") from error

    def _whole_lines(self) -> int:
        """The bytes of the file up to the end of its last whole line."""
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            while end:
                start = max(0, end - TAIL_BYTES)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
        return 0


def record_of(task: FlushTask) -> dict[str, object]:
    """The line of a task."""
    tokens = np.frombuffer(task.tokens, "<u4")
    chunks = (tokens[i : i + CHUNK_TOKENS].tolist() for i in range(0, len(tokens), CHUNK_TOKENS))
    texts = (msgspec.json.encode(chunk)[1:-1] for chunk in chunks)
    fields = task.scope._asdict()
    if task.extra_keys:
        fields["media"] = [
            [position, [[identifier(value), offset] for value, offset in media_items(key)]]
            for position, key in task.extra_keys
        ]
    return {name: value for name, value in fields.items() if value is not None} | {
        "type": "flush",
        "epoch": task.epoch,
        "residency": task.residency.value,
        "tier": (task.tier.name or "").lower(),
        "reason": task.reason.value,
        "start_block_idx": task.start_block_idx,
        "count": task.count,
        "keys": [one.hex() for one in split_hashes(task.hashes)],
        "parent": task.parent.hex(),
        "num_tokens": len(tokens),
        "tokens": msgspec.Raw(b"[%b]" % b",".join(texts)),
    }
