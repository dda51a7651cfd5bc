"""The NUMA node that memory is bound to."""

from __future__ import annotations

import ctypes

from kvactors.device.arena import BIND, MAX_NODES, WORD, Mask, _call

AT_ADDRESS = 2
"""MPOL_F_ADDR: the policy of the memory at an address."""


def bound_node(address: int | None) -> int | None:
    """The node that the memory at an address is bound to, None if it is not bound to one.

    Args:
        address: of the memory. None: the memory that this thread touches first.
    """
    mode, mask = ctypes.c_int(-1), Mask()
    flags = 0 if address is None else AT_ADDRESS
    where = (ctypes.c_ulong(MAX_NODES), ctypes.c_void_p(address), ctypes.c_ulong(flags))
    error = _call(1, ctypes.byref(mode), mask, *where)
    if error:
        raise OSError(error)
    nodes = [node for node in range(MAX_NODES) if mask[node // WORD] >> node % WORD & 1]
    return nodes[0] if mode.value == BIND and len(nodes) == 1 else None
