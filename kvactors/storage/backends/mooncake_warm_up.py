"""The first object of a client of a Mooncake pool: a pool that stores nothing is found at start."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.errors import StoreError
from kvactors.storage.backends.mooncake_codes import NO_SPACE, NOT_FOUND, NOT_READY, OK

PREFIX = "kvactors-warm-up/"
SIZE = 4096
"""Bytes of the object."""

log = get_logger()


def put_and_get(store: Any) -> int:
    """Put an object, read it back, and remove it.

    Args:
        store: the client, set up.

    Returns:
        0, or the code of the call that failed. `NO_SPACE` also if the master evicted the object
        before the read.

    Raises:
        StoreError: other bytes came back.
    """
    name = PREFIX + uuid4().hex
    written = np.frombuffer(np.random.default_rng().bytes(SIZE), np.uint8)
    read = np.zeros(SIZE, np.uint8)
    code = int(store.put_from(name, int(written.ctypes.data), SIZE))
    if code != OK:
        return code
    size = int(store.get_into(name, int(read.ctypes.data), SIZE))
    store.remove(name, True)
    if size in (NOT_FOUND, NOT_READY):
        return NO_SPACE
    if size < 0:
        return size
    if size != SIZE or not np.array_equal(read, written):
        raise StoreError("the Mooncake pool returned other bytes than were written")
    return OK


def check_result(code: int, master: str) -> None:
    """Judge the result of `put_and_get`.

    A pool without space is logged: it may be full, or its first node with memory may join later,
    and costs misses only.

    Args:
        code: the result.
        master: its address, for messages.

    Raises:
        StoreError: the pool did not store the object.
    """
    if code == NO_SPACE:
        log.warning(
            "the Mooncake pool has no space: blocks are not saved until it has", master=master
        )
    elif code != OK:
        raise StoreError(
            f"the Mooncake pool at {master} stores nothing: its first object failed with code "
            f"{code}. Check that this node reaches the other nodes' data ports"
        )
