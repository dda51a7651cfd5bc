"""Reads files of settings: their size and their nesting are bounded."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from kvactors.errors import ConfigError

SETTINGS_BYTES = 16 << 20
"""Bytes of a file of settings at most."""

MAX_NESTING = 32
"""Tables and lists inside one another in a file, at most."""


def read_settings(path: str | Path) -> bytes:
    """The contents of a file of settings, or of a device or a pipe in its place.

    Raises:
        ConfigError: it has more than SETTINGS_BYTES.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(SETTINGS_BYTES + 1)
    if len(data) > SETTINGS_BYTES:
        raise ConfigError(f"{path} has more than {SETTINGS_BYTES >> 20} MiB: it holds no settings")
    return data


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as a mapping.

    Raises:
        ConfigError: it is too large or too deep, or not TOML in UTF-8.
        OSError: it cannot be read.
    """
    raw = read_settings(path)
    try:
        data = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of 5,000 digits
        raise ConfigError(f"{path}: {error}") from error
    level: list[Any] = [data]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise ConfigError(f"{path}: more than {MAX_NESTING} tables inside one another")
    return data
