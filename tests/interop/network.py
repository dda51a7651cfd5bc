"""A network of a case's own: processes in it reach each other over loopback and nothing else, and
all end with the first of them.

Dynamo's indexer listens on every interface, so it runs nowhere else.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 0x1


def isolated(command: list[str]) -> list[str]:
    """A command (of util-linux's unshare) that runs another one in new network, process and mount
    namespaces, with an own /proc and /dev/shm: two can run at once. Unprivileged users get a user
    namespace too. When it is killed, every process inside ends."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*unshare, "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"', *command]


def raise_loopback() -> None:
    """Bring the interface `lo` of this process's network up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        (flags,) = struct.unpack_from(
            "16xH", fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        )
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def is_isolated() -> bool:
    """Whether this process's network has no interface but loopback."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]
