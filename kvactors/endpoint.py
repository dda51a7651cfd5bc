"""The endpoint at which a leader listens for its ranks."""

from __future__ import annotations

import os

from kvactors.errors import ConfigError

PATH_BYTES = 107
"""Bytes of a unix socket's path at most (Linux: 108 with the closing zero)."""


def split_endpoint(endpoint: str) -> tuple[str, str, int]:
    """unix:///path as (unix, path, 0), tcp://host:port as (tcp, host, port), memory://name (the
    same loop) as (memory, name, 0).

    An IPv6 address is written in brackets: tcp://[::1]:5600.

    Raises:
        ConfigError: for any other text, with the value and the reason.
    """
    scheme, found, rest = endpoint.partition("://")
    if found and scheme == "memory" and rest:
        return scheme, rest, 0
    if found and scheme == "unix" and rest:
        return scheme, _socket_path(endpoint, rest), 0
    if found and scheme == "tcp" and rest:
        return "tcp", *_host_and_port(endpoint, rest)
    raise ConfigError(f"ranks.endpoint must be unix:///path or tcp://host:port, not {endpoint!r}")


def _socket_path(endpoint: str, path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"ranks.endpoint needs an absolute path (unix:///path), not {endpoint!r}")
    if len(os.fsencode(path)) > PATH_BYTES:
        raise ConfigError(
            f"ranks.endpoint: the path of a unix socket has at most {PATH_BYTES} bytes, {path!r} "
            "has more"
        )
    return path


def _host_and_port(endpoint: str, rest: str) -> tuple[str, int]:
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(
            "ranks.endpoint: write an IPv6 address in brackets (tcp://[::1]:5600), not "
            f"{endpoint!r}"
        )
    if not colon or not host or "[" in host or "]" in host:
        raise ConfigError(f"ranks.endpoint must be tcp://host:port, not {endpoint!r}")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"ranks.endpoint: a port is a number from 1 to 65535, not {port!r} in {endpoint!r}"
        )
    return host, int(port)
