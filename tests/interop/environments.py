"""The virtual environments of the consumers: which there are, what belongs into each, and whether a
folder has them."""

from __future__ import annotations

import json
import platform
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

PINS = Path(__file__).with_name("pins.toml")
STAMP = "kvactors-interop.json"
"""Name of the file that says what a finished environment was made from."""


class InteropError(Exception):
    """An environment is missing or cannot be made, or a consumer does not work."""


class Pins(NamedTuple):
    """One environment as the file of pins describes it."""

    group: str
    name: str
    packages: tuple[str, ...]
    bare: tuple[str, ...]
    check: str

    @property
    def stamp(self) -> dict[str, Any]:
        """What the environment is made from; another one must be made anew."""
        return {
            "python": platform.python_version(),
            "packages": list(self.packages),
            "bare": list(self.bare),
            "check": self.check,
        }


def pins(path: Path = PINS) -> dict[str, tuple[Pins, ...]]:
    """The environments of every group."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InteropError(f"{path}: {error}") from None
    return {
        group: tuple(_pins(path, group, name, table) for name, table in names.items())
        for group, names in tables.items()
    }


def _pins(path: Path, group: str, name: str, table: dict[str, Any]) -> Pins:
    unknown = table.keys() - {"packages", "bare", "check"}
    if unknown:
        raise InteropError(f"{path}: [{group}.{name}] has no setting {min(unknown)!r}")
    for requirement in (*table.get("packages", ()), *table.get("bare", ())):
        if "==" not in requirement:
            raise InteropError(f"{path}: [{group}.{name}] {requirement!r} is not pinned with ==")
    return Pins(
        group,
        name,
        tuple(table.get("packages", ())),
        tuple(table.get("bare", ())),
        table.get("check", ""),
    )


class Environments:
    """The environments below one folder."""

    def __init__(self, directory: Path, path: Path = PINS) -> None:
        self.directory = directory
        self._pins = {one.name: one for group in pins(path).values() for one in group}

    def program(self, name: str, program: str = "python") -> str:
        """A program of an environment. InteropError if the environment is not there, or was made
        from other pins."""
        one, folder = self._pins[name], self.directory / name
        if made_from(folder) != one.stamp:
            state = "was made from other pins" if (folder / STAMP).is_file() else "is not there"
            raise InteropError(
                f"the environment {folder} {state}: run `python -m tests.interop.setup "
                f"{self.directory} {one.group}` and give "
                f"pytest `--interop {self.directory}`"
            )
        return str(folder / "bin" / program)


def made_from(folder: Path) -> Any:
    """What a finished environment was made from; None for anything else."""
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None
