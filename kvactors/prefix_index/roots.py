"""The root hashes that chains of block hashes start from, under the present namespace."""

from __future__ import annotations

from functools import lru_cache
from secrets import token_hex

from kvactors.identity import PLAIN, CacheScope, RequestScope

REMEMBERED = 1024
"""Roots kept, the least recently used dropped first."""


class Roots:
    """Root hashes by adapter and salt.

    Owned by the system, so that a restarted PrefixIndex continues with the last namespace.
    """

    def __init__(self, model: str, namespace: str, fingerprint: bytes) -> None:
        self.model = model
        self.fingerprint = fingerprint
        self._root = lru_cache(REMEMBERED)(self._hash)
        self._versions: dict[str, str] = {}  # of adapters that were cleared
        self.namespace = namespace

    @property
    def namespace(self) -> str:
        """The one that requests are admitted under, changed by PrefixIndex alone."""
        return self._namespace

    @namespace.setter
    def namespace(self, namespace: str) -> None:
        self._namespace = namespace
        self.plain = self.of(namespace, PLAIN)

    def renew(self, lora: str) -> None:
        """Let requests with an adapter start from another root hash, which no process has used."""
        self._versions[lora] = token_hex(16)

    def root(self, scope: RequestScope) -> bytes:
        """The root hash of requests with this adapter and salt that are admitted now."""
        return self.plain if scope is PLAIN else self.of(self._namespace, scope)

    def of(self, namespace: str, scope: RequestScope) -> bytes:
        """The root hash of such requests under any namespace."""
        version = None if scope.lora is None else self._versions.get(scope.lora)
        return self._root(namespace, scope.lora, scope.salt, version)

    def _hash(
        self, namespace: str, lora: str | None, salt: str | None, version: str | None
    ) -> bytes:
        return CacheScope(self.model, namespace, lora, salt, version).root(self.fingerprint)
