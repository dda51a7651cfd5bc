"""Earlier names of the public API, which still work for one release."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(earlier: str, method: Callable[P, R]) -> Callable[P, R]:
    """A method under its earlier name: it warns, and calls the method.

    Args:
        earlier: the earlier name, for the warning.
        method: the method under its name of today.
    """

    @functools.wraps(method)
    def old(*args: P.args, **kwargs: P.kwargs) -> R:
        warn(f"{earlier}() is deprecated: call {method.__name__}()", stacklevel=2)
        return method(*args, **kwargs)

    old.__doc__ = f"Deprecated: call `{method.__name__}`."
    return old


def warn(text: str, *, stacklevel: int) -> None:
    """Issue a DeprecationWarning.

    Args:
        text: the earlier name, and the one to use.
        stacklevel: as for a `warnings.warn` in the function that calls this one.
    """
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
