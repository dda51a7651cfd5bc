"""Classes that a setting names by their module path."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any


def class_at(
    path: str, base: type, setting: str, known: Iterable[str], error: type[Exception]
) -> Any:
    """The class at `package.module:Class`.

    Args:
        path: the value of the setting.
        base: what the class must derive from.
        setting: named in the error.
        known: the other values of the setting.
        error: raised if there is no such class.
    """
    module, _, name = path.partition(":")
    if not name:
        raise error(
            f"unknown {setting} {path!r}: choose {', '.join(known)} or package.module:Class"
        )
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as fault:
        missing = getattr(fault, "name", None) == module.partition(".")[0]
        advice = ". Install its package, or name its folder in PYTHONPATH" if missing else ""
        raise error(f"{setting} {path!r} cannot be imported: {fault}{advice}") from fault
    if not (isinstance(found, type) and issubclass(found, base)):
        raise error(f"{setting} {path!r} is not a {base.__name__}")
    return found
