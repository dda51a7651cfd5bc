"""Paths that the objects of a rank's store form, read for the leader."""

from __future__ import annotations

from kvactors.data_plane.ranks.protocol import Answer, StoreObjects
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.messages import Outcome


async def next_paths(store: CheckedBackend | None, message: StoreObjects) -> Answer:
    """The next parts; MISS at the end."""
    if store is None:
        return Answer(message.op, bytes([Outcome.MISS]))
    if message.kind == "begin_paths":
        store.begin_paths()
    parts = await store.next_paths(message.most)
    return Answer(
        message.op, bytes([Outcome.MISS if parts is None else Outcome.OK]), paths=tuple(parts or ())
    )
