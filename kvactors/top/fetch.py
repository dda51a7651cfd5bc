"""HTTP client of `kvactors top`: one GET, with a deadline and a limit of its size."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import anyio

from kvactors.errors import ConfigError, KVActorsError

LOOPBACK = "127.0.0.1"

MOST_BYTES = 8 << 20
"""Bytes of an answer at most."""

PIECE = 1 << 16


class Unreachable(KVActorsError):
    """A process does not answer a request, or with something else than HTTP."""


class Target(NamedTuple):
    """The address of a process.

    Attributes:
        host, port: to connect to.
        path: of its metrics.
        encrypted: whether it is an https address.
    """

    host: str
    port: int
    path: str
    encrypted: bool

    @property
    def authority(self) -> str:
        """Host and port as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.encrypted else 'http'}://{self.authority}{self.path}"

    def beside(self, name: str) -> Target:
        """The address of another path of the process, in the folder of its metrics."""
        return self._replace(path=self.path.rpartition("/")[0] + "/" + name)


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes


def parse_target(text: str) -> Target:
    """The address that a user gives: a port of this machine, host:port, or a URL.

    Raises:
        ConfigError: it is none of them.
    """
    if text.isascii() and text.isdigit():
        text = f"{LOOPBACK}:{text}"
    if "://" not in text:
        text = f"http://{text}"
    fault = f"{text!r} is no address: give a port, host:port or http://host:port/metrics"
    try:
        parts = urlsplit(text)
        port = _port(parts)
    except ValueError as error:
        raise ConfigError(f"{fault} ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not _plain(text):
        raise ConfigError(fault)
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{fault}, without a user, a query or a fragment")
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    return Target(parts.hostname, port, path, parts.scheme == "https")


def _plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _port(parts: SplitResult) -> int:
    if parts.port == 0:
        raise ValueError("a port is a number from 1 to 65535")
    return parts.port or (443 if parts.scheme == "https" else 80)


async def fetch(target: Target, seconds: float) -> Answer:
    """One GET.

    Args:
        target: the address.
        seconds: for all of it.

    Raises:
        Unreachable: no answer in time, one that is too large, or no HTTP.
    """
    try:
        with anyio.fail_after(seconds):
            return _parsed(await _exchange(target), target)
    except TimeoutError as error:
        raise Unreachable(f"{target} did not answer within {seconds:g} s") from error
    except (OSError, EOFError, ValueError) as error:
        raise Unreachable(f"{target} cannot be read: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(number).lower()
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:200]


async def _exchange(target: Target) -> bytes:
    reader, writer = await asyncio.open_connection(
        target.host,
        target.port,
        ssl=ssl.create_default_context() if target.encrypted else None,
    )
    try:
        # HTTP/1.0: the answer is whole when the connection ends, and never chunked.
        request = f"GET {target.path} HTTP/1.0\r\nHost: {target.authority}\r\nAccept: */*\r\n\r\n"
        writer.write(request.encode())
        pieces, size = list[bytes](), 0
        while piece := await reader.read(PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                raise Unreachable(f"{target} answers with more than {MOST_BYTES >> 20} MiB")
        return b"".join(pieces)
    finally:
        writer.transport.abort()


def _parsed(data: bytes, target: Target) -> Answer:
    head, found, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ", 2)
    if not found or len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise Unreachable(f"{target} does not answer with HTTP: {data[:40]!r}")
    headers = dict[bytes, bytes]()
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    if b"transfer-encoding" in headers:
        raise Unreachable(f"{target} answers an HTTP/1.0 request with a transfer encoding")
    length = headers.get(b"content-length")
    if length is not None and len(body) < int(length):
        raise Unreachable(f"{target} ended the connection before the end of its answer")
    return Answer(int(words[1]), body if length is None else body[: int(length)])
