"""No setting is parsed and ignored."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

import kvactors
from kvactors.settings import Config
from kvactors.settings.check import InPlaceOf, settings_of

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
