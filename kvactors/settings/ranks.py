"""Settings of tensor-parallel ranks, the endpoint at which the leader listens for them, and the
secret that leader and ranks share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from kvactors.errors import ConfigError
from kvactors.settings.check import LAST_PORT, RankCount, Seconds, Variable, host_and_port

SECRET_VARIABLE = "KVACTORS_RANKS_SECRET"  # noqa: S105  (the name of a variable)
"""Environment variable with the secret, used where `ranks.secret` is not set."""

SECRET_CHARACTERS = 16  # characters of a secret at least
PATH_BYTES = 107  # bytes of a unix socket's path at most (Linux: 108 with the closing zero)


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
    """Tensor-parallel ranks.

    Attributes:
        count: ranks. With more than one, worker processes run `kvactors.serve_rank`, and
            layout.tensor_parallel must agree.
        endpoint: unix:///path or tcp://host:port of the leader (this process).
        timeout_s: seconds an answer may take before a rank counts as silent.
        startup_timeout_s: seconds in which all ranks must join. A rank that sends keys of stored
            objects gets more.
        secret: at least 16 characters shared by leader and ranks. Required for tcp.
    """

    count: RankCount = 1
    endpoint: str = ""
    timeout_s: Seconds = 2.0
    startup_timeout_s: Seconds = 30.0
    secret: Annotated[str, Variable(SECRET_VARIABLE)] = ""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"RanksConfig({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        hidden = {"secret": "<set>"} if self.secret else {}
        return list((msgspec.structs.asdict(self) | hidden).items())

    def faults(self, tensor_parallel: int) -> Iterator[str]:
        """Settings that cannot be, with `tensor_parallel` of the layout."""
        try:
            if self.secret:
                _check_secret("ranks.secret", self.secret)
            if self.count > 1:
                split_endpoint(self.endpoint)
        except ConfigError as error:
            yield str(error)
        if self.count > 1 and tensor_parallel != self.count:
            yield (
                f"layout.tensor_parallel is {tensor_parallel}, ranks.count {self.count}: they must "
                "agree"
            )

    def with_secret(self, environ: Mapping[str, str]) -> RanksConfig:
        """These settings with the secret of the environment, if none is set."""
        secret = environ.get(SECRET_VARIABLE, "")
        if self.count == 1 or self.secret or not secret:
            return self
        _check_secret(SECRET_VARIABLE, secret)
        return msgspec.structs.replace(self, secret=secret)

    def check_exposure(self) -> None:
        """Raise ConfigError for an endpoint of ranks that needs a secret when none is set."""
        if self.count > 1 and split_endpoint(self.endpoint)[0] == "tcp" and not self.secret:
            raise ConfigError(
                f"ranks at {self.endpoint} need a shared secret: set ranks.secret or "
                f"{SECRET_VARIABLE}, or use a unix:// endpoint"
            )


def _check_secret(name: str, secret: str) -> None:
    if len(secret) < SECRET_CHARACTERS:
        raise ConfigError(
            f"{name} must have at least {SECRET_CHARACTERS} characters, it has {len(secret)}"
        )


def split_endpoint(endpoint: str) -> tuple[str, str, int]:
    """unix:///path as (unix, path, 0), tcp://host:port as (tcp, host, port), memory://name (the
    same loop) as (memory, name, 0).

    An IPv6 address is written in brackets: tcp://[::1]:5600.
    """
    scheme, found, rest = endpoint.partition("://")
    if found and scheme == "memory" and rest:
        return scheme, rest, 0
    if found and scheme == "unix" and rest:
        if not rest.startswith("/") or "\0" in rest:
            raise ConfigError(
                f"ranks.endpoint needs an absolute path (unix:///path), not {endpoint!r}"
            )
        if len(os.fsencode(rest)) > PATH_BYTES:
            raise ConfigError(
                f"ranks.endpoint: the path of a unix socket has at most {PATH_BYTES} bytes, "
                f"{rest!r} has more"
            )
        return scheme, rest, 0
    if not found or scheme != "tcp" or not rest:
        raise ConfigError(
            f"ranks.endpoint must be unix:///path or tcp://host:port, not {endpoint!r}"
        )
    try:
        host, port = host_and_port(endpoint)
    except ValueError as error:
        raise ConfigError(f"ranks.endpoint {error}") from None
    if not port:
        raise ConfigError(f"ranks.endpoint needs a port from 1 to {LAST_PORT}, not {endpoint!r}")
    return "tcp", host, port
