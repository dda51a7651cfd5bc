"""Parsing of ZMQ endpoints: validity, reachability from other machines, and equality."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

LAST_PORT = 65_535
TRANSPORTS = ("tcp", "ipc", "inproc")


class Endpoint(NamedTuple):
    """host: without brackets. Of ipc and inproc the path or name. port: 0 lets the system choose,
    -1 without tcp."""

    transport: str
    host: str
    port: int = -1

    @classmethod
    def of(cls, text: str) -> Endpoint:
        """Parse an endpoint. Raises ValueError with the reason."""
        transport, mark, rest = text.partition("://")
        if not mark or transport not in TRANSPORTS:
            raise ValueError(f"must begin with tcp://, ipc:// or inproc://, not {text!r}")
        if transport != "tcp":
            if not rest or "\0" in rest:
                raise ValueError(
                    f"must have a {'path' if transport == 'ipc' else 'name'} after {transport}://, "
                    f"not {text!r}"
                )
            return cls(transport, rest)
        host, mark, port = rest.rpartition(":")
        if not mark or not host or not (port.isascii() and port.isdigit()):
            raise ValueError(f"must be tcp://host:port with a number for the port, not {text!r}")
        if int(port) > LAST_PORT:
            raise ValueError(f"must have a port of at most {LAST_PORT}, not {text!r}")
        bracketed = host.startswith("[") and host.endswith("]")
        if ":" in host and not bracketed:
            raise ValueError(
                f"must have an IPv6 address in brackets, as in tcp://[::1]:5557, not {text!r}"
            )
        return cls(transport, host[1:-1] if bracketed else host, int(port))

    @property
    def any_host(self) -> bool:
        """Whether it stands for every interface of this machine."""
        address = self._address
        return self.transport == "tcp" and (
            self.host == "*" or (address is not None and address.is_unspecified)
        )

    @property
    def _address(self) -> IPv4Address | IPv6Address | None:
        """The host as an address, in any notation. None for a name. An IPv4 address in IPv6
        notation is returned as IPv4."""
        try:
            address = ip_address(self.host)
        except ValueError:
            return None
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return mapped or address

    @property
    def ipv6(self) -> bool:
        """Whether its address is one of IPv6."""
        return self.transport == "tcp" and ":" in self.host

    @property
    def own(self) -> bool:
        """Whether a publisher listens there (this machine's addresses, ipc, inproc) rather than
        connecting to it."""
        address = self._address
        named = self.host == "localhost" or self.host.startswith(
            "127."
        )  # also in short forms, as 127.1
        return (
            self.transport != "tcp"
            or self.any_host
            or named
            or (address is not None and address.is_loopback)
        )

    def clashes(self, other: Endpoint) -> bool:
        """Whether two sockets cannot both listen there."""
        if self.transport != other.transport:
            return False
        if self.transport != "tcp":
            return self.host == other.host
        same_host = self.host == other.host or self.any_host or other.any_host
        return self.port == other.port != 0 and same_host


def of_rank(text: str, dp_rank: int) -> str:
    """The endpoint of a data-parallel rank: a tcp port is raised by it, other names get a suffix.
    ValueError for a port that is too high."""
    if not text or not dp_rank:
        return text
    endpoint = Endpoint.of(text)
    if endpoint.transport != "tcp":
        return f"{text}_dp{dp_rank}"
    if not endpoint.port:
        return text
    raised = f"{text.rpartition(':')[0]}:{endpoint.port + dp_rank}"
    Endpoint.of(raised)
    return raised
