"""Binding of memory to a NUMA node, by the system calls of Linux (mbind(2), get_mempolicy(2))."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

from kvactors.errors import ConfigError

CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of mbind and get_mempolicy, by machine."""

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
    mask = Mask()
    mask[node // WORD] |= 1 << node % WORD
    where = (ctypes.c_void_p(address), ctypes.c_ulong(size))
    error = _call(0, *where, ctypes.c_int(BIND), mask, ctypes.c_ulong(MAX_NODES), ctypes.c_uint(0))
    if error:
        raise ConfigError(
            f"{setting} is {node}, and the host memory cannot be bound to it: {error}"
        )


def bound_node(address: int) -> int | None:
    """The node that the memory at an address is bound to, None if it is not bound to one.

    Raises:
        OSError: the system refuses the call.
    """
    mode, mask = ctypes.c_int(-1), Mask()
    where = (ctypes.c_ulong(MAX_NODES), ctypes.c_void_p(address), ctypes.c_ulong(AT_ADDRESS))
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
