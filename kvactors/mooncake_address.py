"""The address of a Mooncake master: `host:port`, or `etcd://host:port;host:port` where etcd elects
the master of several."""

from __future__ import annotations

from typing import NamedTuple

from kvactors.errors import ConfigError

SCHEMES = ("etcd", "redis")
"""Services that elect masters. Mooncake's client takes the addresses as they are."""

SETTING = "storage.mooncake.master_server_address"


class Endpoint(NamedTuple):
    """A server that can be connected to."""

    host: str
    port: int


def endpoints(address: str) -> list[Endpoint]:
    """The servers of an address: the master, or those that have the elected one's address.

    Raises:
        ConfigError: the address has another form.
    """
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme not in SCHEMES:
        raise ConfigError(
            f"{SETTING} is host:port, or {' or '.join(f'{one}://host:port' for one in SCHEMES)} "
            f"for masters with high availability, not {address!r}"
        )
    return [_endpoint(one, address) for one in (rest.split(";") if separator else [rest])]


def _endpoint(text: str, address: str) -> Endpoint:
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{SETTING} {address!r}: {text!r} has no port (host:port)")
    if "/" in host or (":" in host and not bracketed):
        raise ConfigError(f"{SETTING} {address!r}: {host!r} is no host")
    return Endpoint(host.strip("[]") or "127.0.0.1", int(port))
