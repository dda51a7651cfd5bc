"""A sink that appends JSON lines to a file.

{"type": "epoch", "epoch": 1732150000000}
{"type": "flush", "epoch": .., "residency": "resident" | "gone", "tier": "device" | "host" | "storage", "reason": "commit" | ..,
"start_block_idx": 0, "count": 2, "keys": [hex, ..], "parent": hex, "tokens": [..all tokens from the root on..]}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import aiofiles
import msgspec
import numpy as np

from kvactors.config import SinkConfig
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.units import Residency, Tier, split_keys


class JsonLinesSink(Sink):
    """path: appended to; its folder must exist (SinkError otherwise)."""

    def __init__(self, config: SinkConfig, block_size: int) -> None:
        super().__init__(config, block_size)
        self.path = Path(config.path)
        if not self.path.parent.is_dir():
            raise SinkError(f"sink {self.name!r}: {self.path.parent} is not a folder")
        self._encoder = msgspec.json.Encoder()

    async def begin(self, epoch: int) -> None:
        """See `Sink.begin`."""
        await self._append([{"type": "epoch", "epoch": epoch}])

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """See `Sink.deliver`."""
        await self._append([as_record(task) for task in tasks])

    async def _append(self, records: list[dict[str, object]]) -> None:
        lines = b"".join(self._encoder.encode(record) + b"\n" for record in records)
        async with aiofiles.open(self.path, "ab") as file:
            await file.write(lines)


def as_record(task: FlushTask) -> dict[str, object]:
    """A task as the fields of its line."""
    return {
        "type": "flush",
        "epoch": task.epoch,
        "residency": task.residency.value,
        "tier": (task.tier.name or "").lower(),
        "reason": task.reason.value,
        "start_block_idx": task.start_block_idx,
        "count": task.count,
        "keys": [key.hex() for key in split_keys(task.keys)],
        "parent": task.parent.hex(),
        "tokens": np.frombuffer(task.tokens, "<u4").tolist(),
    }


def replay(path: str | Path) -> dict[Tier, set[bytes]]:
    """The view that a file of such lines stands for: names by tier. ValueError for a line that is none."""
    view: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
    for line in Path(path).read_bytes().splitlines():
        record = msgspec.json.decode(line)
        if record["type"] == "epoch":
            view = {tier: set() for tier in Tier}
        elif record["type"] == "flush":
            keys = {bytes.fromhex(key) for key in record["keys"]}
            held = view[Tier[record["tier"].upper()]]
            view[Tier[record["tier"].upper()]] = held | keys if record["residency"] == Residency.RESIDENT.value else held - keys
        else:
            raise ValueError(f"unknown record type {record['type']!r}")
    return view
