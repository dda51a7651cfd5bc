"""Earlier names of settings, which still work for one release."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kvactors.errors import ConfigError

LEAST = 1e-15
"""The share that stands for no block, since a watermark of 0 is off."""


def _same(value: Any) -> Any:
    return value


CLASS_KIND = "class"
"""Tag of the struct whose `class_path` names a class of another package."""


class Earlier:
    """The earlier name of a setting, as an attribute of its table.

    Args:
        name: the setting's name of today.
        now: makes today's value from an earlier one.
        then: makes an earlier value from today's.
    """

    def __init__(
        self,
        name: str,
        now: Callable[[Any], Any] = _same,
        then: Callable[[Any], Any] = _same,
    ) -> None:
        self.name = name
        self.now = now
        self.changes_value = now is not _same
        self._then = then
        self._earlier = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._earlier = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        _warn(self._earlier, self.name, "", stacklevel=2)
        return self._then(getattr(instance, self.name))


class SettingsMeta(msgspec.StructMeta):
    """Tables of settings can be made with the earlier names of their settings."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Make a table."""
        return super().__call__(*args, **modern_names(kwargs, cls, "", stacklevel=2))


def earlier_names(table: type) -> Iterator[tuple[str, Earlier]]:
    """The earlier names of a table's settings."""
    for owner in table.__mro__:
        for name, value in vars(owner).items():
            if isinstance(value, Earlier):
                yield name, value


def modern_names(
    data: Mapping[str, Any], table: type, where: str, *, stacklevel: int
) -> dict[str, Any]:
    """The settings of one table under their names of today. Each earlier name warns.

    Args:
        data: the settings, under either name.
        table: the struct of the table.
        where: the table's name, for messages.
        stacklevel: as for a `warnings.warn` in the caller.

    Raises:
        ConfigError: a setting is given under both names.
    """
    found = dict(data)
    for earlier, setting in earlier_names(table):
        if earlier not in found:
            continue
        old, new = (f"{where}.{name}" if where else name for name in (earlier, setting.name))
        if setting.name in found:
            raise ConfigError(f"{new} is given twice: remove {old}, its earlier name")
        value = found.pop(earlier)
        found[setting.name] = now = setting.now(value)
        _warn(old, new, _other_value(value, now), stacklevel=stacklevel + 1)
    return found


def used_share(free: Any) -> Any:
    """A fraction of free blocks as a fraction of used ones. Anything else as it is, for the checks
    of the settings."""
    return max(1.0 - free, LEAST) if type(free) in (int, float) and 0 < free <= 1 else free


def flush_mode(only: Any) -> Any:
    """`flush.mode` of a `flush.only`."""
    return ("flush_only" if only else "normal") if isinstance(only, bool) else only


def is_flush_only(mode: Any) -> Any:
    """`flush.only` of a `flush.mode`."""
    return None if mode is None else mode == "flush_only"


def _other_value(earlier: Any, now: Any) -> str:
    """The end of a warning about a setting whose value has changed with its name: who replaces the
    name alone would get another setting."""
    if now == earlier:
        return ""
    shown = [json.dumps(round(v, 9) if type(v) is float else v) for v in (now, earlier)]
    return f", with the value {shown[0]} in place of {shown[1]}"


def _warn(earlier: str, name: str, value: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"the setting {earlier} is deprecated: it is called {name} now{value}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
