"""Messages for a source tree whose native module has not been built. Uses the standard library
alone."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]


def native_missing(reason: str) -> str:
    """The message for a missing native module.

    Args:
        reason: of the failed import.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = f"kvactors' native module is missing or was built for another Python than {version}"
    if (TREE / "native" / "CMakeLists.txt").exists():
        text += f": {TREE} is a source tree"
        if installed_elsewhere():
            text += ", which hides the installed kvactors. Run from another folder, or build"
        else:
            text += ". Build it"
        text += " with `pip install -e .` in that folder (needs a C++17 compiler)"
    return f"{text} ({reason})"


def explain(error: ImportError) -> str:
    """One line for an import that failed when the command line was started."""
    missing = error.name or ""
    if isinstance(error, ModuleNotFoundError) and not missing.startswith("kvactors"):
        return (
            f"kvactors: the package {missing!r} is not installed for {sys.executable}: install "
            f"kvactors with its dependencies (`pip install -e .` in {TREE})"
        )
    return f"kvactors: {' '.join(str(error).split())}"


def installed_elsewhere() -> bool:
    """Whether kvactors is installed in another folder than this one."""
    try:
        found = metadata.distribution("kvactors").locate_file("kvactors/__init__.py")
    except metadata.PackageNotFoundError:
        return False
    return Path(str(found)).exists() and Path(str(found)).resolve().parents[1] != TREE
