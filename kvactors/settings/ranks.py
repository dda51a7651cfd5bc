"""The endpoint at which a leader listens for its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from kvactors.errors import ConfigError
from kvactors.settings.check import RankCount, Seconds

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


# -- Settings of tensor-parallel ranks, and the secret that leader and ranks share.


SECRET_VARIABLE = "KVACTORS_RANKS_SECRET"  # noqa: S105  (the name of a variable)
"""Environment variable with the secret, used where `ranks.secret` is not set."""

SECRET_CHARACTERS = 16
"""Characters of a secret at least."""


class Secret:
    """A secret whose text appears in no repr, log or traceback."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return "Secret(set)" if self._text else "Secret(unset)"

    def encoded(self) -> bytes:
        """The bytes that keys are derived from."""
        return self._text.encode()


class RanksConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of tensor-parallel ranks.

    Attributes:
        count: ranks. With more than one, each worker process runs `kvactors.serve_rank`, and
            layout.tensor_parallel must be the same number.
        endpoint: unix:///path or tcp://host:port, where the leader (this process) listens.
        timeout_s: seconds an answer may take before a rank counts as silent.
        startup_timeout_s: seconds all ranks together may take to join. A rank that is sending the
            keys of its stored objects gets additional time for that.
        secret: at least 16 characters that leader and ranks share, or the variable
            KVACTORS_RANKS_SECRET. Required for tcp.
    """

    count: RankCount = 1
    endpoint: str = ""
    timeout_s: Seconds = 2.0
    startup_timeout_s: Seconds = 30.0
    secret: str = ""

    def __repr__(self) -> str:
        shown = (
            f"count={self.count!r}, endpoint={self.endpoint!r}, timeout_s={self.timeout_s!r}, "
            f"startup_timeout_s={self.startup_timeout_s!r}"
        )
        return f"RanksConfig({shown}, secret={'<set>' if self.secret else ''!r})"

    def __rich_repr__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
        yield "count", self.count
        yield "endpoint", self.endpoint
        yield "timeout_s", self.timeout_s
        yield "startup_timeout_s", self.startup_timeout_s
        yield "secret", "<set>" if self.secret else ""

    def check(self, tensor_parallel: int) -> None:
        """Raise ConfigError for ranks that cannot be.

        Args:
            tensor_parallel: of the layout.
        """
        if self.secret and len(self.secret) < SECRET_CHARACTERS:
            raise ConfigError(
                f"ranks.secret must have at least {SECRET_CHARACTERS} characters, it has "
                f"{len(self.secret)}"
            )
        if self.count == 1:
            return
        split_endpoint(self.endpoint)
        if tensor_parallel != self.count:
            raise ConfigError(
                f"layout.tensor_parallel is {tensor_parallel}, ranks.count {self.count}: they must "
                "agree"
            )

    def with_secret(self, environ: Mapping[str, str]) -> RanksConfig:
        """These settings with the secret of the environment, if none is set."""
        secret = environ.get(SECRET_VARIABLE, "")
        if self.count == 1 or self.secret or not secret:
            return self
        if len(secret) < SECRET_CHARACTERS:
            raise ConfigError(
                f"{SECRET_VARIABLE} must have at least {SECRET_CHARACTERS} characters, it has "
                f"{len(secret)}"
            )
        return msgspec.structs.replace(self, secret=secret)

    def check_exposure(self) -> None:
        """Raise ConfigError for an endpoint of ranks that needs a secret when none is set."""
        if self.count > 1 and split_endpoint(self.endpoint)[0] == "tcp" and not self.secret:
            raise ConfigError(
                f"ranks at {self.endpoint} need a shared secret: set ranks.secret or "
                f"{SECRET_VARIABLE}, or use a unix:// endpoint"
            )
