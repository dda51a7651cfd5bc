"""Where a leader listens for its ranks."""

from __future__ import annotations

from kvactors.errors import ConfigError


def split_endpoint(endpoint: str) -> tuple[str, str, int]:
    """unix:///path as (unix, path, 0), tcp://host:port as (tcp, host, port), memory://name (the same loop) as (memory, name, 0).
    ConfigError for anything else."""
    scheme, found, rest = endpoint.partition("://")
    if found and scheme in ("unix", "memory") and rest:
        return scheme, rest, 0
    host, colon, port = rest.rpartition(":")
    if found and scheme == "tcp" and colon and host and port.isdigit() and int(port) < 1 << 16:
        return "tcp", host.strip("[]"), int(port)
    raise ConfigError(f"an endpoint of ranks is unix:///path or tcp://host:port, not {endpoint!r}")
