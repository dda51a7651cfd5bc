"""Old import paths of moved modules: they keep working for one release, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(old: str, new: str, **renamed: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module whose contents moved.

    Args:
        old: the old module path.
        new: the module path where the names are now.
        renamed: for names that changed, too: the new name, or `module.path:name` where it is in
            another module than `new`.
    """

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        module, _, found = renamed.get(name, name).rpartition(":")
        module = module or new
        try:
            value = getattr(import_module(module), found)
        except AttributeError:
            raise AttributeError(f"module {old!r} has no attribute {name!r}") from None
        warnings.warn(
            f"{old}.{name} has moved: import {found} from {module}",
            DeprecationWarning,
            stacklevel=2,
        )
        return value

    return attribute
