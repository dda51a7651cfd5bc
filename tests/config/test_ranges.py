"""Every number among the settings has a range. Values out of it or of another type are named
errors, however the config was made."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import kvactors
from kvactors.errors import ConfigError
from kvactors.settings import Config
from kvactors.settings.check import InPlaceOf, describe, settings_of
from kvactors.settings.sinks import AnySinkConfig


def leaves(settings: msgspec.Struct, where: str) -> Iterator[tuple[str, Any]]:
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield from leaves(value, f"{where}.{name}")
        else:
            yield f"{where}.{name}", value


TABLES = tuple(settings_of(Config))


def hint_of(name: str) -> Any:
    hint: Any = Config
    for part in name.split("."):
        hint = settings_of(hint)[part].hint
    return hint


def check(config: Config) -> None:
    """As `open` checks a config that was constructed."""
    Config.from_env({}, config)


def ranges(struct: type[msgspec.Struct], where: str) -> Iterator[tuple[str, msgspec.Meta | None]]:
    """The numbers of a table and their ranges, None for one that has none."""
    for name, setting in settings_of(struct).items():
        hint = setting.hint
        parts = (hint, *typing.get_args(hint))
        metas = [m for part in parts for m in getattr(part, "__metadata__", ())]
        metas = [m for m in metas if m.gt is not None or m.ge is not None]
        kinds = {kind for part in parts for kind in (part, *typing.get_args(part))}
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from ranges(hint, f"{where}.{name}")
        elif metas or kinds & {int, float}:
            yield f"{where}.{name}", metas[0] if metas else None


LEAVES = [leaf for table in TABLES for leaf in leaves(getattr(Config(), table), table)]
RANGES = dict(one for table in TABLES for one in ranges(type(getattr(Config(), table)), table))
SIZES = {name for name, value in LEAVES if describe(hint_of(name)).startswith("a size")}
"""Sizes in bytes, which may be texts."""


def changed(name: str, value: Any) -> Config:
    """A constructed config with one value in the place of another."""
    table, _, rest = name.partition(".")
    old = getattr(Config(), table)
    inner, _, field = rest.rpartition(".")
    if inner:
        new = msgspec.structs.replace(
            old, **{inner: msgspec.structs.replace(getattr(old, inner), **{field: value})}
        )
    else:
        new = msgspec.structs.replace(old, **{field: value})
    return Config(**{table: new})


def test_every_number_has_a_range():
    assert [name for name, meta in RANGES.items() if meta is None] == []
    assert len(RANGES) > 50
    for sink in get_args(AnySinkConfig):
        assert [name for name, meta in ranges(sink, "sink") if meta is None] == []


@pytest.mark.parametrize("name", RANGES)
def test_numbers_out_of_range_are_named(name):
    meta = RANGES[name]
    is_float = isinstance(dict(LEAVES)[name], float)
    beyond = [(meta.gt if meta.ge is None else meta.ge - 1), meta.le + 1 + meta.le / 1000]
    if is_float:
        beyond += [float("nan"), float("inf"), -float("inf")]
    else:
        beyond = [int(value) for value in beyond]
    for value in beyond:
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")) as error:
            check(changed(name, value))
        assert f"{meta.le:.0f}" in str(error.value), "the allowed range is named"


@pytest.mark.parametrize(("name", "value"), LEAVES, ids=[name for name, _ in LEAVES])
def test_values_of_other_types_are_named(name, value):
    wrong: list[Any] = [object(), {1: 2}, b"x"]
    wrong += (
        ["x"]
        if not isinstance(value, str) and name not in SIZES
        else [5]
        if isinstance(value, str) and name not in SIZES
        else []
    )
    wrong += [] if value is None else [None]
    for one in wrong:
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            check(changed(name, one))


@pytest.mark.parametrize(
    "name", [name for name, value in LEAVES if isinstance(value, str) and name not in SIZES]
)
def test_texts_that_no_file_system_or_key_takes_are_named(name):
    for text in ("a\0b", "\ud800", "x" * 5000):
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            check(changed(name, text))


# -- use


PACKAGE = Path(kvactors.__file__).parent
CHECKS = {PACKAGE / "settings" / "load.py", PACKAGE / "settings" / "check.py"}


def settings(kind: type[msgspec.Struct], where: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        name = f"{where}{field.name}"
        if any(isinstance(mark, InPlaceOf) for mark in settings_of(kind)[field.name].marks):
            continue  # `capacity.in_blocks` reads it by its mark
        yield name
        for outer in (field.type, *typing.get_args(field.type)):
            for inner in (outer, *typing.get_args(outer)):
                if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                    yield from settings(inner, f"{name}.")


def test_every_setting_is_read():
    read = set()
    for file in PACKAGE.rglob("*.py"):
        if file in CHECKS:  # that a value is checked does not make it used
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.arg) and "layout" in file.parts:
                read.add(node.arg)  # a layout is made with its options as arguments
    unread = {name for name in settings(Config) if name.rpartition(".")[2] not in read}
    assert unread == set()
