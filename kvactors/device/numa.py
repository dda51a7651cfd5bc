"""Binding of memory to a NUMA node, by the system calls of Linux (mbind(2), set_mempolicy(2),
get_mempolicy(2))."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvactors.errors import ConfigError

CALLS = {"x86_64": (237, 239, 238), "aarch64": (235, 236, 237)}
"""Numbers of mbind, get_mempolicy and set_mempolicy, by machine."""

BIND = 2
"""MPOL_BIND: pages are taken from the given nodes only."""

AT_ADDRESS = 2
"""MPOL_F_ADDR: the policy of the memory at an address."""

MAX_NODES = 1024
WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
Mask = ctypes.c_ulong * (MAX_NODES // WORD)


def bind(address: int, size: int, node: int, setting: str = "host.numa_node") -> None:
    """Let the pages of a range, none of which was touched yet, come from one node.

    Args:
        address: of the range, page aligned.
        size: its bytes.
        node: number of the node.
        setting: named in the error.

    Raises:
        ConfigError: this machine has no such node, or the system refuses the call.
    """
    mask = _mask(node)
    where = (ctypes.c_void_p(address), ctypes.c_ulong(size))
    error = _call(0, *where, ctypes.c_int(BIND), mask, ctypes.c_ulong(MAX_NODES), ctypes.c_uint(0))
    if error:
        raise ConfigError(
            f"{setting} is {node}, and the host memory cannot be bound to it: {error}"
        )


@contextmanager
def pages_from(node: int | None, setting: str) -> Iterator[None]:
    """Let the pages that this thread touches first come from one node. For memory that other code
    makes and touches at once.

    Args:
        node: number of the node, None for the system's choice.
        setting: named in the error.

    Raises:
        ConfigError: this machine has no such node, or the system refuses the call.
    """
    if node is None:
        yield
        return
    mode, mask = ctypes.c_int(-1), Mask()
    nowhere = (ctypes.c_void_p(), ctypes.c_ulong())
    error = _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(MAX_NODES), *nowhere)
    error = error or _set_policy(BIND, _mask(node))
    if error:
        raise ConfigError(f"{setting} is {node}, and host memory cannot come from it: {error}")
    try:
        yield
    finally:
        _set_policy(mode.value, mask)


def _set_policy(mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> str:
    return _call(2, ctypes.c_int(mode), mask, ctypes.c_ulong(MAX_NODES))


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    mask = Mask()
    mask[node // WORD] |= 1 << node % WORD
    return mask


def bound_node(address: int | None) -> int | None:
    """The node that the memory at an address is bound to, None if it is not bound to one.

    Args:
        address: of the memory. None: the memory that this thread touches first.

    Raises:
        OSError: the system refuses the call.
    """
    mode, mask = ctypes.c_int(-1), Mask()
    flags = 0 if address is None else AT_ADDRESS
    where = (ctypes.c_ulong(MAX_NODES), ctypes.c_void_p(address), ctypes.c_ulong(flags))
    error = _call(1, ctypes.byref(mode), mask, *where)
    if error:
        raise OSError(error)
    nodes = [node for node in range(MAX_NODES) if mask[node // WORD] >> node % WORD & 1]
    return nodes[0] if mode.value == BIND and len(nodes) == 1 else None


def _call(which: int, *arguments: object) -> str:
    """Make a system call. Returns the error, empty if there was none."""
    numbers = CALLS.get(platform.machine())
    if numbers is None or sys.platform != "linux":
        return f"it is not supported on {sys.platform} {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
