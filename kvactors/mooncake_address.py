"""Addresses of a Mooncake pool: its master, `host:port`, or `etcd://host:port;host:port` where etcd
elects the master of several, and its metadata server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from kvactors.errors import ConfigError

SCHEMES = ("etcd", "redis")
"""Services that elect masters. Mooncake's client takes the addresses as they are."""

HANDSHAKE = "P2PHANDSHAKE"
"""In place of a metadata server: clients ask each other."""

MASTER = "storage.mooncake.master_server_address"
METADATA = "storage.mooncake.metadata_server"


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
            f"{MASTER} is host:port, or {' or '.join(f'{one}://host:port' for one in SCHEMES)} "
            f"for masters with high availability, not {address!r}"
        )
    texts = rest.split(";") if separator else [rest]
    return [_endpoint(MASTER, address, text) for text in texts]


def metadata_endpoints(server: str) -> Sequence[Endpoint]:
    """The metadata servers of a pool. Empty if its clients ask each other.

    Mooncake's client aborts the process for a scheme that it was built without (its packages have
    no Redis), and blocks it for minutes if etcd does not answer.

    Raises:
        ConfigError: the client would abort the process, or wait for a server that cannot be.
    """
    if server == HANDSHAKE:
        return ()
    scheme, separator, rest = server.rpartition("://")
    if separator and scheme in ("http", "https"):
        try:
            rest = urlsplit(server).netloc.rpartition("@")[2]
        except ValueError as error:  # half of an IPv6 address
            raise ConfigError(f"{METADATA} {server!r}: {error}") from None
        if rest and ":" not in rest.rpartition("]")[2]:
            rest += ":443" if scheme == "https" else ":80"
        return [_endpoint(METADATA, server, rest)]
    if separator and scheme != "etcd":
        raise ConfigError(
            f"{METADATA} is {HANDSHAKE}, http://host:port/metadata or etcd://host:port, not "
            f"{server!r}: Mooncake's client would abort the process"
        )
    # etcd is the client's default scheme
    return [_endpoint(METADATA, server, text) for text in rest.split(";")]


def _endpoint(setting: str, address: str, text: str) -> Endpoint:
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{setting} {address!r}: {text!r} has no port (host:port)")
    if "/" in host or (":" in host and not bracketed):
        raise ConfigError(f"{setting} {address!r}: {host!r} is no host")
    return Endpoint(host.strip("[]") or "127.0.0.1", int(port))
