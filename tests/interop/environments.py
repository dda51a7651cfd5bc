"""The virtual environments of the consumers: which there are, what belongs into each, and whether a
folder has them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tomllib
from pathlib import Path
from typing import Any

import msgspec

PINS = Path(os.environ.get("INTEROP_PINS") or Path(__file__).with_name("pins.toml"))
ROOT = Path(__file__).parents[2]
STAMP = "kvactors-interop.json"
"""Name of the file that describes how a finished environment was made."""
CLONE_STAMP = "kvactors-clone.json"
"""Name of the file that names the clone of kvactors in an environment."""


class InteropError(Exception):
    """An environment is missing or cannot be made, or a consumer does not work."""


class Pins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One environment as the file of pins describes it."""

    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    check: str = ""
    clone: bool = False
    sources: tuple[str, ...] = ()
    source_parts: tuple[str, ...] = ()
    source_environment: dict[str, str] = {}
    base: str = ""
    group: str = ""
    name: str = ""

    @property
    def stamp(self) -> dict[str, Any]:
        """The inputs of the environment. One made from other inputs must be made anew."""
        made_from = {
            "python": platform.python_version(),
            "packages": list(self.packages),
            "bare": list(self.bare),
            "check": self.check,
        }
        if self.sources:
            made_from |= {"sources": list(self.sources), "source_parts": list(self.source_parts)}
        if self.base:
            made_from["base"] = self.base
        return made_from


def pins(path: Path = PINS) -> dict[str, tuple[Pins, ...]]:
    """The environments of every group."""
    try:
        tables = tomllib.loads(path.read_text())
        return {
            group: tuple(_pins(group, name, list(names), table) for name, table in names.items())
            for group, names in tables.items()
        }
    except (OSError, ValueError) as error:
        raise InteropError(f"{path}: {error}") from None


def _pins(group: str, name: str, names: list[str], table: dict[str, Any]) -> Pins:
    one = msgspec.convert(table | {"group": group, "name": name}, Pins)
    for requirement in (*one.packages, *one.bare, *one.sources):
        if "==" not in requirement:
            raise ValueError(f"[{group}.{name}] {requirement!r} is not pinned with ==")
    if one.base and one.base not in names[: names.index(name)]:
        raise ValueError(
            f"[{group}.{name}] base {one.base!r} is not an earlier environment of the group"
        )
    return one


class Environments:
    """The environments below one folder."""

    def __init__(self, directory: Path, path: Path = PINS) -> None:
        self.directory = directory
        self._pins = {one.name: one for group in pins(path).values() for one in group}

    def program(self, name: str, program: str = "python") -> str:
        """A program of an environment. InteropError if the environment is not there, or was made
        from other pins."""
        one, folder = self._pins[name], self.directory / name
        if one.base:
            self.program(one.base)
        state = ""
        if made_from(folder) != one.stamp:
            state = "was made from other pins" if (folder / STAMP).is_file() else "is not there"
        elif one.clone and made_from(folder, CLONE_STAMP) != clone_stamp():
            state = "has another clone of kvactors, or was made before native/ changed"
        if state:
            raise InteropError(
                f"the environment {folder} {state}: run `python -m tests.interop.setup "
                f"{self.directory} {one.group}` and give "
                f"pytest `--interop={self.directory}`"
            )
        return str(folder / "bin" / program)

    def source(self, name: str, requirement: str) -> Path:
        """The folder of a source distribution that was unpacked into an environment."""
        self.program(name)
        return source_folder(self.directory / name, requirement)


def source_folder(folder: Path, requirement: str) -> Path:
    """Where an environment keeps the parts of a source distribution."""
    return folder / "sources" / requirement.replace("==", "-")


def clone_stamp() -> dict[str, str]:
    """Identifies this clone, the sources of its native module and its modules by name: an editable
    installation finds each at the path that it had then."""
    modules = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "kvactors").rglob("*.py"))
    digest = hashlib.sha256("\0".join(modules).encode())
    for file in sorted((ROOT / "native").rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return {"clone": str(ROOT), "sources": digest.hexdigest()}


def made_from(folder: Path, stamp: str = STAMP) -> Any:
    """The inputs of a finished environment, None for any other folder."""
    try:
        return json.loads((folder / stamp).read_text())
    except (OSError, ValueError):
        return None
