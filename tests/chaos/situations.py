"""The situations there are. To add one: a module of this package with a `SITUATION`, and its name
here."""

from __future__ import annotations

from importlib import import_module

from kvactors.errors import ConfigError
from tests.chaos.record import Situation

MODULES = (
    "killed",
    "stopped",
    "full_disk",
    "readers",
    "mooncake",
    "damage",
    "read_only",
    "ranks",
    "attention_store",
)


def situations(only: str = "") -> list[Situation]:
    """All, or the one of this name. ConfigError if there is none."""
    if only and only not in MODULES:
        raise ConfigError(f"there is no situation {only!r}: use one of {', '.join(MODULES)}")
    found: list[Situation] = [
        import_module(f"tests.chaos.{name}").SITUATION for name in MODULES if only in ("", name)
    ]
    return found
