"""Settings of a Mooncake store: from TOML, from the JSON file that MOONCAKE_CONFIG_PATH names, and
from MOONCAKE_* variables, in this order of precedence. The addresses of a pool's servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvactors.errors import ConfigError
from kvactors.settings.check import (
    ByteSize,
    Seconds,
    Variable,
    changed_in,
    convert,
    in_bytes,
    logger,
    read_settings,
    settings_of,
)

TABLE = "storage.mooncake"
MASTER = f"{TABLE}.master_server_address"
METADATA = f"{TABLE}.metadata_server"

SCHEMES = ("etcd", "redis")
"""Services that elect masters. Mooncake's client takes the addresses as they are."""

HANDSHAKE = "P2PHANDSHAKE"  # in place of a metadata server: clients ask each other

SYNONYMS = {"device_name": "rdma_devices", "master_server_addr": "master_server_address"}
"""Names that sample files of Mooncake and FastDeploy use."""


class MooncakeConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a Mooncake pool is joined. MOONCAKE_CONFIG_PATH names a JSON file with these settings.

    Attributes:
        master_server_address: host:port of mooncake_master, or etcd://host:port;host:port where
            etcd elects one of several.
        metadata_server: P2PHANDSHAKE, http://host:port/metadata, or etcd://host:port;host:port.
        local_hostname: this client's address for others. Empty: this machine's.
        global_segment_size: bytes of memory given to the pool.
        local_buffer_size: bytes of staging.
        protocol: of transfers.
        rdma_devices: names, comma-separated. Rank r takes the r-th, round robin.
        timeout_s: seconds a call may take.
        connect_timeout_s: seconds to join.
        payload_checksums: write and verify a checksum of each payload. If false, changed bytes are
            served. Every node of a pool needs the same value: nodes with true do not serve objects
            without a checksum.
    """

    master_server_address: Annotated[
        str, Variable("MOONCAKE_MASTER_SERVER_ADDR"), Variable("MOONCAKE_MASTER_SERVER_ADDRESS")
    ] = ""
    metadata_server: Annotated[str, Variable("MOONCAKE_METADATA_SERVER")] = "P2PHANDSHAKE"
    local_hostname: Annotated[str, Variable("MOONCAKE_LOCAL_HOSTNAME")] = ""
    global_segment_size: Annotated[ByteSize, Variable("MOONCAKE_GLOBAL_SEGMENT_SIZE")] = 1 << 30
    local_buffer_size: Annotated[ByteSize, Variable("MOONCAKE_LOCAL_BUFFER_SIZE")] = 128 << 20
    protocol: Annotated[Literal["tcp", "rdma"], Variable("MOONCAKE_PROTOCOL")] = "tcp"
    rdma_devices: Annotated[str, Variable("MOONCAKE_RDMA_DEVICES")] = ""
    timeout_s: Seconds = 5.0
    connect_timeout_s: Seconds = 15.0
    payload_checksums: bool = True

    def devices_of(self, rank: int) -> str:
        names = [name.strip() for name in self.rdma_devices.split(",") if name.strip()]
        return names[rank % len(names)] if names else ""

    def check(self) -> None:
        if not self.master_server_address:
            raise ConfigError(
                "storage.mooncake.master_server_address is missing (host:port of mooncake_master)"
            )
        endpoints(self.master_server_address)
        metadata_endpoints(self.metadata_server)
        if self.local_hostname == "localhost":
            raise ConfigError(
                "storage.mooncake.local_hostname must be an address that other nodes can reach, "
                "not 'localhost'"
            )


def largest_registration(environ: Mapping[str, str]) -> int | None:
    """Bytes of a memory registration at most (MC_MAX_MR_SIZE), None without a limit."""
    text = environ.get("MC_MAX_MR_SIZE", "")
    try:
        size = int(text or "0", 0)
    except ValueError:
        size = -1
    if size < 0:
        raise ConfigError(f"MC_MAX_MR_SIZE must be a number of bytes, 0 for no limit, not {text!r}")
    return size or None


def resolve(config: MooncakeConfig, environ: Mapping[str, str]) -> MooncakeConfig:
    """The settings, with values of the file and the variables in place of defaults. Raises
    ConfigError: a value cannot be, or the client's own buffer, which it registers in one piece over
    RDMA, is larger than a registration may be."""
    found: dict[str, Any] = {
        field: environ[variable.name]
        for field, setting in settings_of(MooncakeConfig).items()
        for variable in setting.marks
        if environ.get(variable.name)
    }
    found |= _from_file(environ.get("MOONCAKE_CONFIG_PATH", ""))
    given = {name: getattr(config, name) for name in changed_in(config)}
    resolved = convert({**found, **given}, MooncakeConfig, TABLE)
    resolved.check()
    largest = largest_registration(environ)
    size = in_bytes(resolved.local_buffer_size, "local_buffer_size")
    if resolved.protocol == "rdma" and largest is not None and size > largest:
        raise ConfigError(
            f"{TABLE}.local_buffer_size is {size} bytes, and MC_MAX_MR_SIZE allows registrations "
            f"of {largest}"
        )
    return resolved


def _from_file(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        data = msgspec.json.decode(read_settings(path))
    except (OSError, ConfigError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"MOONCAKE_CONFIG_PATH: {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"MOONCAKE_CONFIG_PATH: {path} must hold an object")
    named = {SYNONYMS.get(str(name), str(name)): value for name, value in data.items()}
    strange = sorted(set(named) - set(MooncakeConfig.__struct_fields__))
    if strange:
        logger().warning(
            "settings of a Mooncake file that mean nothing here", path=path, names=strange
        )
    return {name: value for name, value in named.items() if name not in strange}


# -- addresses of servers


class PoolServer(NamedTuple):
    """A server that can be connected to."""

    host: str
    port: int


def endpoints(address: str) -> list[PoolServer]:
    """The servers of an address: the master, or those that have the elected one's address."""
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme not in SCHEMES:
        raise ConfigError(
            f"{MASTER} is host:port, or {' or '.join(f'{one}://host:port' for one in SCHEMES)} "
            f"for masters with high availability, not {address!r}"
        )
    texts = rest.split(";") if separator else [rest]
    return [_endpoint(MASTER, address, text) for text in texts]


def metadata_endpoints(server: str) -> Sequence[PoolServer]:
    """The metadata servers of a pool. Empty if its clients ask each other.

    Mooncake's client aborts the process for a scheme that it was built without (its packages have
    no Redis), and blocks it for minutes if etcd does not answer. Raises ConfigError: the client
    would abort the process, or wait for a server that cannot be."""
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


def _endpoint(setting: str, address: str, text: str) -> PoolServer:
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{setting} {address!r}: {text!r} has no port (host:port)")
    if "/" in host or (":" in host and not bracketed):
        raise ConfigError(f"{setting} {address!r}: {host!r} is no host")
    return PoolServer(host.strip("[]") or "127.0.0.1", int(port))
