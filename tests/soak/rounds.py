"""Rounds of the soak: seeds of the oracle, and of processes killed with SIGKILL."""

from __future__ import annotations

import time

import structlog

from tests.oracle.killed import run_killed
from tests.oracle.record import Record
from tests.oracle.run import run_seed
from tests.soak.memory import Memory, grow_intern_table, measure

ROUND = 400
"""Requests of a round."""

KILLED_EVERY = 8
"""One round in so many is a process that is killed and started again on its store."""


def rounds(seed: int, requests: int, size: int, until: float) -> tuple[Record, list[Memory]]:
    """Rounds of `size` requests until the requests are made or `until` (of `time.monotonic`) has
    come. Returns their counts and the memory after each."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    grow_intern_table()
    total, memory, made = Record(), list[Memory](), 0
    while made < requests and time.monotonic() < until:
        number = seed * 1_000_003 + len(memory)
        total.add(run_seed(number, min(size, requests - made)))
        if len(memory) % KILLED_EVERY == KILLED_EVERY - 1:
            total.add(run_killed(number))
        made += size
        memory.append(measure())
    return total, memory
