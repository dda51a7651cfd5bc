"""Reasons for refusing a rank, and the ranks that a leader still waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvactors.data_plane.ranks.protocol import MOST_NAMES, Identity
from kvactors.data_plane.ranks.state import Rank, RankState
from kvactors.data_plane.ranks.strangers import Strangers
from kvactors.identity import StoreIdentity
from kvactors.ranks_config import RanksConfig


class Wanted(Protocol):
    """Requirements of a leader on every rank. See `RankGroup`."""

    config: RanksConfig
    identity: StoreIdentity
    blocks: int
    slots: int
    storage: str


def misfit(identity: Identity, wanted: Wanted) -> str:
    """Why a rank does not meet the requirements, with both values. Empty if it meets them."""
    ours, count = wanted.identity, wanted.config.count
    rows = (
        ("rank count", identity.ranks, count),
        ("model", identity.model, ours.model),
        ("storage namespace", identity.namespace, ours.namespace),
        ("storage back end", identity.storage, wanted.storage),
        ("layout", identity.fingerprint.hex()[:16], ours.fingerprint.hex()[:16]),
        ("device blocks", identity.blocks, wanted.blocks),
        ("host slots", identity.slots, wanted.slots),
    )
    for name, theirs, own in rows:
        if theirs != own:
            return f"rank {identity.rank} has {name} {theirs!r}, the leader has {own!r}"
    if not 0 <= identity.rank < count:
        return f"there is no rank {identity.rank} of {count}"
    if not 0 <= identity.objects <= MOST_NAMES:
        return (
            f"rank {identity.rank} has {identity.objects} stored objects, at most {MOST_NAMES} are "
            "possible"
        )
    return ""


def lacking(ranks: Iterable[Rank], config: RanksConfig, strangers: Strangers) -> str:
    """The ranks that did not join in time, and the refused connections."""
    missing = [rank.number for rank in ranks if rank.health is not RankState.HEALTHY]
    refused = [f"{number} connections refused: {kind}" for kind, number in strangers.counts.items()]
    details = "; ".join([*strangers.shown, *refused])
    text = f"ranks {missing} of {config.count} did not come to {config.endpoint} in time"
    return f"{text} ({details})" if details else text
