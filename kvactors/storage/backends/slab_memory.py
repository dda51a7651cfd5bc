"""Memory that slabs are read into and written from, by address."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvactors.device.arena import Arena


def memory(address: int, size: int) -> Any:
    """Memory as a buffer."""
    return (ctypes.c_char * size).from_address(address)


def address_of(buffer: Any) -> int:
    """The address of a buffer."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def extent(view: memoryview, arena: Arena | None) -> tuple[int, int]:
    """Address of a view, and the bytes from there on that are its slot's."""
    address = address_of(view)
    if arena is not None and 0 <= address - arena.address < arena.num_slots * arena.stride:
        return address, arena.stride
    return address, len(view)
