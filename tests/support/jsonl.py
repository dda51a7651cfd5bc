"""What a file of a jsonl sink stands for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvactors.types import Residency, Tier


def replay_jsonl(path: str | Path) -> dict[Tier, set[bytes]]:
    """The view that a file of such lines stands for. A last line without its end does not count.
    Raises ValueError for a line that is none, OSError if the file cannot be read."""
    view: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
    for line in Path(path).read_bytes().split(b"\n")[:-1]:
        record = msgspec.json.decode(line)  # msgspec.DecodeError is a ValueError
        if record["type"] == "epoch":
            view = {tier: set() for tier in Tier}
        elif record["type"] == "flush":
            held = view[Tier[record["tier"].upper()]]
            hashes = [bytes.fromhex(one) for one in record["keys"]]
            gained = Residency(record["residency"]) is Residency.RESIDENT
            (held.update if gained else held.difference_update)(hashes)
        else:
            raise ValueError(f"unknown record type {record['type']!r}")
    return view
