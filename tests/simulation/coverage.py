"""Coverage of the runs: the things exercised, and the reachable things that were never
exercised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvactors.actor import Actor, edges
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.gpu_swapper.actor import GpuSwapper
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.storage.actors import StorageReader, StorageWriter
from kvactors.storage.device_store import DeviceStoreActor
from kvactors.testing.plan import DRAWN

ACTORS: tuple[type[Actor], ...] = (
    PrefixIndex,
    GpuSwapper,
    CpuEvictor,
    StorageReader,
    StorageWriter,
    DeviceStoreActor,
    FlushNotifier,
)
"""Those a simulation wires."""

WORKERS = {
    "storage_reader": {"Probed", "ReadDone", "BlocksRemoved"},
    "storage_writer": {"Written", "StoreCleared", "BlocksAdded", "BlocksRemoved", "TierCleared"},
}
"""Messages that each storage actor really sends: the actors declare the same ones, since they
answer through the same code."""

OUTCOMES: Mapping[str, tuple[str, ...]] = {
    "acquire": ("ok", "NoRoom", "DeadlineExceeded", "Paused", "ActorFailed", "cancelled"),
    "wait_ready": ("ok", "NoRoom", "LeaseEnded", "ActorFailed", "RankLost", "cancelled"),
    "wait_layer": ("ok", "NoRoom", "ActorFailed", "RankLost", "cancelled"),
    "extend": (
        "ok",
        "NoRoom",
        "DeadlineExceeded",
        "LeaseEnded",
        "ActorFailed",
        "RankLost",
        "cancelled",
    ),
    "reserve": (
        "ok",
        "NoRoom",
        "DeadlineExceeded",
        "LeaseEnded",
        "ActorFailed",
        "RankLost",
        "cancelled",
    ),
    "truncate": ("ok", "LeaseEnded", "ActorFailed", "RankLost", "TokensCommitted", "cancelled"),
    "step": ("ok", "DeadlineExceeded", "DeviceError", "cancelled"),
    "next_chunk": ("ok", "NoRoom", "cancelled"),
    "commit": ("ok", "LeaseEnded", "ActorFailed", "RankLost", "cancelled"),
    "finish": ("ok", "LeaseEnded", "ActorFailed", "cancelled"),
    "preempt": ("ok", "LeaseEnded", "ActorFailed", "RankLost", "cancelled"),
    "clear": ("ok", "ActorFailed", "cancelled"),
    "clear storage": ("ok", "ActorFailed", "StoreUnsupported", "cancelled"),
    "pause": ("ok", "DeadlineExceeded", "ActorFailed", "cancelled"),
    "set_namespace": ("ok", "ActorFailed", "cancelled"),
    "fork": ("ok", "NoRoom", "DeadlineExceeded", "ActorFailed", "LeaseEnded", "cancelled"),
    "sleep": ("ok", "LeasesOpen", "CacheAsleep", "SleepUnsupported", "ActorFailed", "cancelled"),
    "unpin": ("ok", "ActorFailed", "cancelled"),
    "quota": ("ok", "ActorFailed", "cancelled"),
    "clear salt": ("ok", "ActorFailed", "cancelled"),
    "clear lora": ("ok", "ActorFailed", "cancelled"),
    "prefetch": ("ok", "ActorFailed", "StoreUnsupported", "cancelled"),
    "wait_idle": ("ok", "DeadlineExceeded", "cancelled"),
}

STATES = (
    *(
        f"place {a} to {b}"
        for a, b in (
            ("resident", "leaving"),
            ("resident", "transit"),
            ("resident", "free"),
            ("resident", "ghost"),
            ("leaving", "resident"),
            ("leaving", "transit"),
            ("leaving", "free"),
            ("leaving", "ghost"),
            ("transit", "resident"),
            ("transit", "free"),
            ("transit", "ghost"),
        )
    ),
    *(
        f"health {a} to {b}"
        for a, b in (
            ("away", "healthy"),
            ("healthy", "silent"),
            ("silent", "healthy"),
            ("healthy", "away"),
            ("silent", "away"),
        )
    ),
    *(
        f"lease {what}"
        for what in (
            "granted to forgotten",
            "loading to ended",
            "layer checked",
            "ready to finish",
            "ready to preempt",
            "ready to abandon",
            "ready to fail",
            "ready to leave",
            "ready to lost",
        )
    ),
    "lives again",
    "forked",
    "forks of a fork",
    "slept 1",
    "slept 2",
    "hints",
    "pinned",
    "unpinned",
    "pins compared",
    "ended in a pass",
    "entry ended",
    "entry uncovered ValueError",
    "steps cancelled",
    "steps of 8 or more",
    "steps that evict",
    "steps refused",
    "tokens computed before a step",
    "clear salt compared",
    "evictions by a quota",
    "host evictions by a quota",
    *(
        f"load {what}"
        for what in (
            "whole",
            "part",
            "none",
            "unplaced",
            "placed",
            "cancelled",
            "stalled",
            "overdue",
        )
    ),
)

MET = (
    "copy_fail",
    "copy_slow",
    "copy_hang",
    "store",
    "store_hang",
    "torn_write",
    "bit_flip",
    "object_lost",
    "sink",
    "sink_duplicate",
    "rank_silent",
    "rank_lost",
)


class Coverage(NamedTuple):
    """By group of things: how many there are, and which of them never happened."""

    there: dict[str, int]
    never: dict[str, list[str]]


def universe() -> dict[str, list[str]]:
    """Everything that can be reached, by group."""
    told = [
        f"message {edge.sender} {edge.receiver} {edge.message.__name__}"
        for edge in edges(ACTORS)
        if edge.message.__name__ in WORKERS.get(edge.sender, {edge.message.__name__})
    ]
    turns = sorted(
        {
            f"crash {actor.ROLE} {when} {kind.__name__}"
            for actor in ACTORS
            for kind in actor.HANDLERS
            for when in ("before", "after")
        }
    )
    return {
        "faults": [f"fault {kind}" for kind in DRAWN if kind != "actor_crash"],
        "faults met": [f"met {what}" for what in MET],
        "messages": told,
        "outcomes": [
            f"outcome {what} {outcome}"
            for what, outcomes in OUTCOMES.items()
            for outcome in outcomes
        ],
        "states": list(STATES),
        "deaths": turns,
    }


def coverage(reports: Iterable[Mapping[str, int]]) -> Coverage:
    """Of many runs' `seen` together."""
    seen: Counter[str] = Counter()
    for one in reports:
        seen.update(one)
    groups = universe()
    never = {group: [what for what in things if not seen[what]] for group, things in groups.items()}
    return Coverage({group: len(things) for group, things in groups.items()}, never)
