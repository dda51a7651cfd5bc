"""Old names of the `Backend` contract: back ends written against them keep working for one
release."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any

METHODS = {
    "told": "acknowledge_removed",
    "lost": "take_removed",
    "names": "iter_keys",
}
ATTRIBUTES = {"trailer": "slot_trailer_bytes", "uncleared": "clear_pending"}


def adopt_old_names(cls: type) -> None:
    """Give a new subclass of `Backend` both names of each member that was renamed.

    A method under its old name gets the new one as well, with a DeprecationWarning. A method under
    its new name gets the old one as well, so that `super().told()` of a subclass finds it.
    """
    own = vars(cls)
    for old, new in METHODS.items():
        if new in own:
            if old not in own:
                setattr(cls, old, own[new])
        elif old in own:
            _warn(cls, old, new)
            setattr(cls, new, own[old])
    for old, new in ATTRIBUTES.items():
        if old in own:
            _warn(cls, old, new)
            if new not in own:
                setattr(cls, new, own[old])
            delattr(cls, old)  # instances then reach the new attribute through `OldAttribute`


def _warn(cls: type, old: str, new: str) -> None:
    warnings.warn(
        f"{cls.__module__}.{cls.__qualname__} defines {old!r}, which is called {new!r} now",
        DeprecationWarning,
        stacklevel=4,
    )


class OldAttribute:
    """An old name of an attribute of the object, or of one of its parts.

    Args:
        path: the attribute now, with dots.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return attrgetter(self._path)(owner if instance is None else instance)

    def __set__(self, instance: object, value: Any) -> None:
        part, _, name = self._path.rpartition(".")
        setattr(attrgetter(part)(instance) if part else instance, name, value)
