"""Settings of a Valkey or Redis store: from TOML, and from KVACTORS_VALKEY_* variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, urlsplit

import msgspec

from kvactors.errors import ConfigError
from kvactors.settings.check import Number, Seconds, Variable, host_and_port

VARIABLES = tuple(f"KVACTORS_VALKEY_{name}" for name in ("URL", "USERNAME", "PASSWORD"))
SCHEMES = {"valkey": "redis", "valkeys": "rediss", "redis": "redis", "rediss": "rediss"}
"""Schemes of a URL over TCP, and the client's names for them."""

OPTIONS = ("db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options that the query of a URL may have. The client would take any of its arguments."""

FAULT = (
    "storage.valkey.url must be valkey://HOST:PORT, valkeys://HOST:PORT (TLS) or unix:///PATH, "
    f"user and password percent-encoded, with no other options than {OPTIONS[0]} and, with TLS, "
    f"{', '.join(OPTIONS[1:])}"
)


class ValkeyConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A Valkey or Redis server, or a cluster.

    Attributes:
        url: valkey://USER:PASSWORD@HOST:PORT/DB, valkeys:// with TLS (or redis, rediss), or
            unix:///PATH?db=DB. Nodes of a cluster: valkey://HOST:PORT,HOST:PORT. Options:
            ?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE. The last two variables give a
            user and a password that the URL lacks.
        ttl_s: seconds until the server drops an object that is not written again. 0: only eviction
            drops it.
        timeout_s: seconds that connecting or an answer may take.
    """

    url: Annotated[str, *map(Variable, VARIABLES)] = ""
    ttl_s: Number = 0
    timeout_s: Seconds = 2.0

    def __repr__(self) -> str:
        return f"ValkeyConfig({self.shown!r}, ttl_s={self.ttl_s}, timeout_s={self.timeout_s})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("url", self.shown), ("ttl_s", self.ttl_s), ("timeout_s", self.timeout_s)]

    @property
    def shown(self) -> str:
        """The URL without user, password and options."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if rest else ""

    def addresses(self) -> list[str]:
        """The client's URL of each address. Raises ConfigError, without any part of the URL: it may
        be of a password that is not percent-encoded."""
        try:
            parts = urlsplit(self.url)
            options = dict(parse_qsl(parts.query, keep_blank_values=True))
            allowed = OPTIONS if parts.scheme in ("valkeys", "rediss") else OPTIONS[:1]
            if parts.fragment or options.keys() - set(allowed):
                raise ConfigError(FAULT)
            int(options.get("db", 0))
            if parts.scheme == "unix" and parts.path:
                return [self.url]
            int(parts.path.strip("/") or 0)  # the number of a database
            login, at, hosts = parts.netloc.rpartition("@")
            found = []
            for host in hosts.split(","):
                whole = host if ":" in host.rpartition("]")[2] else f"{host}:6379"
                host_and_port(f"tcp://{whole}")
                place = {"scheme": SCHEMES[parts.scheme], "netloc": login + at + whole}
                found.append(parts._replace(**place).geturl())
            return found
        except (KeyError, ValueError):
            raise ConfigError(FAULT) from None


def with_variables(config: ValkeyConfig, environ: Mapping[str, str]) -> ValkeyConfig:
    """The settings, with variables for what the URL does not have. Raises ConfigError."""
    url, user, password = (environ.get(name, "") for name in VARIABLES)
    config = msgspec.structs.replace(config, url=config.url or url)
    config.addresses()
    scheme, _, rest = config.url.partition("://")
    if (user or password) and "@" not in rest:
        login = f"{quote(user, safe='')}:{quote(password, safe='')}"
        config = msgspec.structs.replace(config, url=f"{scheme}://{login}@{rest}")
    return config
