"""Settings of a `TierCache`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvactors.cpu_evictor.policy import POLICIES
from kvactors.errors import ConfigError

FINGERPRINT_DOMAIN = b"kvactors.tiers.v1"


class TierConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of a `TierCache`.

    Attributes:
        model: name of the model. Blocks of different models never mix.
        block_bytes: bytes of a block, that is of a host slot and of a stored object.
        num_slots: host slots.
        identity: everything else that blocks must share to be interchangeable: layout, dtype,
            tokens a block, the engine's hash algorithm and seed, parallel sizes.
        policy: order of eviction from the host tier.
        events: the tiers whose changes `TierCache.take_events` returns, for the publisher of the
            engine.
    """

    model: str
    block_bytes: int
    num_slots: int
    identity: Mapping[str, str | int | float | bool | None] = {}
    policy: str = "lru"
    events: tuple[Literal["host"], ...] = ()

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 over `identity` and the bytes of a block."""
        fields = {"block_bytes": self.block_bytes, "identity": dict(self.identity)}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(FINGERPRINT_DOMAIN + text.encode()).digest()


def checked_config(config: TierConfig | Mapping[str, Any]) -> TierConfig:
    """A config whose values fit.

    Raises:
        ConfigError: names the first setting that is unknown, malformed or out of range.
    """
    try:
        found = msgspec.convert(
            msgspec.to_builtins(config) if isinstance(config, TierConfig) else config, TierConfig
        )
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    if not found.model:
        raise ConfigError("model is needed: blocks of different models must not mix")
    for name in ("block_bytes", "num_slots"):
        if getattr(found, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(found, name)}")
    if found.policy not in POLICIES:
        raise ConfigError(f"unknown policy {found.policy!r}, known are {', '.join(POLICIES)}")
    return found
