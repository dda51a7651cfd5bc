"""Every number among the settings has a range. Values out of it or of another type are named
errors, however the config was made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvactors.config import Config
from kvactors.errors import ConfigError
from kvactors.ranges import RANGES
from kvactors.validation import CONFIG_TABLES, validate

SIZES = {
    "storage.mooncake.global_segment_size",
    "storage.mooncake.local_buffer_size",
    "storage.free_space_floor",
    "storage.capacity_bytes",
}
"""Sizes in bytes, which have their own check."""


def leaves(settings: msgspec.Struct, where: str) -> Iterator[tuple[str, Any]]:
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield from leaves(value, f"{where}.{name}")
        else:
            yield f"{where}.{name}", value


LEAVES = [leaf for table in CONFIG_TABLES for leaf in leaves(getattr(Config(), table), table)]
NUMBERS = [
    name for name, value in LEAVES if isinstance(value, int | float) and not isinstance(value, bool)
]


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
    assert set(NUMBERS) - SIZES <= set(RANGES)
    assert all(name in dict(LEAVES) for name in RANGES)


@pytest.mark.parametrize("name", RANGES)
def test_numbers_out_of_range_are_named(name):
    bounds = RANGES[name]
    beyond = [
        bounds.low - 1,
        bounds.high + 1 + bounds.high / 1000,
        *([bounds.low] if bounds.open else []),
    ]
    if isinstance(dict(LEAVES)[name], float):
        beyond += [float("nan"), float("inf"), -float("inf")]
    else:
        beyond = [int(value) for value in beyond]
    for value in beyond:
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            validate(changed(name, value))


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
            validate(changed(name, one))


@pytest.mark.parametrize(
    "name", [name for name, value in LEAVES if isinstance(value, str) and name not in SIZES]
)
def test_texts_that_no_file_system_or_key_takes_are_named(name):
    for text in ("a\0b", "\ud800", "x" * 5000):
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            validate(changed(name, text))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", "a\nb", "x" * 201])
def test_a_store_namespace_is_a_plain_name(name):
    with pytest.raises(ConfigError, match=r"storage\.namespace"):
        Config.from_mapping({"storage": {"backend": "memory", "namespace": name}})
