"""The report of one seed."""

from __future__ import annotations

import msgspec


class SeedReport(msgspec.Struct):
    """violations: as text, empty if all is well. seen: how often each thing of the coverage
    happened. trace: a digest of every message sent and every turn taken, with its virtual time.
    config, plan: as JSON. verified: blocks whose bytes were checked. wrong: blocks that did not
    hold the expected bytes.
    """

    seed: int
    violations: list[str] = []
    requests: int = 0
    answered: int = 0
    verified: int = 0
    wrong: int = 0
    faults: int = 0
    turns: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    trace: str = ""
    seen: dict[str, int] = {}
    config: str = ""
    plan: str = ""
    tail: list[str] = []

    def same_run(self, other: SeedReport) -> bool:
        """Whether both report the same run: all fields are equal but the wall clock's time."""
        return msgspec.structs.replace(self, wall_s=0.0) == msgspec.structs.replace(
            other, wall_s=0.0
        )
