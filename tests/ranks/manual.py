"""A leader, and hand-made ranks that send exactly the messages of a test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from kvactors.data_plane.base import Direction
from kvactors.data_plane.ranks.connection import check_leader, connect
from kvactors.data_plane.ranks.leader import RankGroup
from kvactors.data_plane.ranks.plane import RankStore
from kvactors.data_plane.ranks.protocol import CopyBlocks, Identity, Names, SendNames, Welcome
from kvactors.identity import StoreIdentity
from kvactors.settings.ranks import RanksConfig, Secret
from kvactors.testing.loop import simulate

ENDPOINT = "memory://by-hand"
SECRET = "sixteen letters at least"
SCOPE = StoreIdentity("model-a", "default", b"f" * 32)
A, B, C = (bytes([byte]) * 32 for byte in b"abc")


def identity(rank: int = 0, **over) -> Identity:
    values = {
        "rank": rank,
        "ranks": 2,
        "model": SCOPE.model,
        "namespace": SCOPE.namespace,
        "storage": "none",
        "fingerprint": SCOPE.fingerprint,
        "blocks": 8,
        "slots": 6,
    }
    return Identity(**{**values, **over})


def group_at(endpoint: str = ENDPOINT, **over) -> RankGroup:
    config = {
        "count": 2,
        "endpoint": endpoint,
        "timeout_s": 0.3,
        "startup_timeout_s": 5.0,
        "secret": SECRET,
        **over,
    }
    return RankGroup(RanksConfig(**config), SCOPE, 8, 6, layers=9)


async def authenticated(endpoint: str = ENDPOINT, secret: str = SECRET):
    """An authenticated connection."""
    wire = await connect(endpoint)
    assert await check_leader(wire, Secret(secret))
    return wire


async def come(rank: int, keys: bytes = b"", endpoint: str = ENDPOINT, **over):
    """A rank by hand with these names in its store, admitted."""
    wire = await authenticated(endpoint)
    wire.send(identity(rank, objects=len(keys) // 32, **over))
    while isinstance(message := await wire.receive(), SendNames):
        wire.send(Names(keys, last=True))
        keys = b""
    assert isinstance(message, Welcome), message
    return wire


@asynccontextmanager
async def opened(*keys: bytes):
    """A group with its two ranks, and a store as it sees theirs."""
    group = group_at()
    store = RankStore(group, 64, 1.0, exclusive=False)
    opening = asyncio.ensure_future(group.open())
    await settle()
    wires = [await come(rank, (*keys, b"", b"")[rank]) for rank in range(2)]
    await opening
    try:
        yield group, store, wires
    finally:
        await group.close()


def simulated(main):
    def test() -> None:
        simulate(main)

    test.__name__ = main.__name__
    return test


def copy(op: int) -> CopyBlocks:
    return CopyBlocks(op, Direction.TO_DEVICE, (1, 2), (3, 4), True)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)
