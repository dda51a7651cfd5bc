"""Scenarios, settings of replays and a small trace that are part of the package."""

from __future__ import annotations

from os.path import lexists
from pathlib import Path

from rich.console import Console

from kvactors.errors import ConfigError
from kvactors.scenario.output import print_rows
from kvactors.settings.check import read_toml, unknown

INSTALLED = Path(__file__).resolve().parents[1] / "scenarios"
"""The files in an installed package."""

IN_A_CLONE = Path(__file__).resolve().parents[2] / "scenarios"
"""The same in a clone, also if kvactors is installed from there as editable."""

SUFFIXES = {
    "scenario": (".toml", ""),
    "settings": (".toml", "replay/"),
    "trace": (".jsonl", "traces/"),
}
"""Suffix and folder of each kind of file."""


def names_of(kind: str) -> list[str]:
    """The names of the files of a kind."""
    suffix, folder = SUFFIXES[kind]
    return sorted(path.stem for path in (_root() / folder).glob(f"*{suffix}"))


def find_file(path: Path, kind: str) -> Path:
    """A file of the caller, or the one of that name that is part of the package."""
    if lexists(path):  # a link that leads nowhere is the caller's too
        return path
    suffix, folder = SUFFIXES[kind]
    if len(path.parts) == 1 and path.suffix in ("", suffix):
        shipped = _root() / folder / f"{path.stem}{suffix}"
        if shipped.exists():
            return shipped
    raise ConfigError(f"there is no file {path}: {unknown(kind, path.stem, names_of(kind))}")


def print_scenarios(console: Console) -> None:
    """Print the scenarios of the package with their descriptions."""
    found = {name: find_file(Path(name), "scenario") for name in names_of("scenario")}
    rows = [
        (name, read_toml(path)["scenario"].get("description", "")) for name, path in found.items()
    ]
    print_rows("scenarios", ("name", "what it proves"), rows, console, numbers=range(0))


def find_toml(path: Path) -> Path:
    """A file of the caller, or the scenario or the settings of a replay of that name."""
    if not lexists(path):
        for kind in ("scenario", "settings"):
            if path.stem in names_of(kind):
                return find_file(path, kind)
    return path


def _root() -> Path:
    return INSTALLED if INSTALLED.is_dir() else IN_A_CLONE
