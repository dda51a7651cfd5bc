"""The vocabulary of faults: what can go wrong, at which seam, and for how long."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Kind = Literal[
    "copy_fail",
    "copy_slow",
    "copy_hang",
    "store_down",
    "store_slow",
    "store_hang",
    "torn_write",
    "bit_flip",
    "disk_full",
    "object_lost",
    "sink_down",
    "sink_hang",
    "sink_lose_answers",
    "sink_duplicate",
    "rank_silent",
    "rank_cut",
    "rank_lost",
    "actor_crash",
    "cancel",
    "clock_jump",
    "sink_slow",
    "sink_fail_every",
    "sink_lose_state",
    "store_small",
    "store_refuse_block",
    "store_count_low",
    "store_count_invalid",
    "store_leak",
    "store_lose_answers",
    "process_kill",
    "process_stop",
    "link_cut",
    "link_silent",
    "client_leave",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

STEPPED: frozenset[Kind] = frozenset({"actor_crash", "cancel", "client_leave"})
"""Kinds whose moment is a count: of an actor's turns, of a client's awaits, of requests."""

LASTING: frozenset[Kind] = frozenset(KINDS) - {
    "copy_fail",
    "torn_write",
    "bit_flip",
    "object_lost",
    "rank_cut",
    "actor_crash",
    "sink_lose_state",
    "link_cut",
    "client_leave",
}
"""Kinds for which `duration` means something: how long it lasts, by how much the clock jumps, how
long an await goes on before its cancellation."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong.

    Attributes:
        kind: the seam and what happens there.
        at: seconds since the work began, or, of an actor_crash, cancel or client_leave, which turn,
            await or request (from 1 on).
        target: an actor's or sink's name, the number of a rank or client, the first if empty.
        duration: seconds.
        amount: pairs, writes or objects concerned. Of store_small the blocks that a store has space
            for, of store_refuse_block a device block.
        every: of sink_fail_every which calls fail, of a file store's bit_flip which slots: every
            n-th.
        delay: seconds more that a call takes while its sink or store is slow. None for a store: in
            proportion to `amount`. Of an SDK's store_hang: seconds until a call goes on. Of a
            client_leave: seconds from the acquire until the task is cancelled.
    """

    kind: Kind
    at: float = 0.0
    target: str = ""
    duration: float = 0.0
    amount: int = 1
    every: int = 2
    delay: float | None = None
