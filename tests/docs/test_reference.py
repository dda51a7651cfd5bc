"""The generated pages agree with the code."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from kvactors.settings import Config
from kvactors.settings.check import settings_of
from kvactors.settings.schema import tables_of
from tests.docs.generators import DOCS, HINT, pages
from tests.docs.generators.reference import commands, described_parameters, error_classes, raisers

FOLDER = DOCS / "reference"
PAGES = {path.name: text for path, text in pages().items()}


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_a_page_is_up_to_date(path):
    assert path.read_text("utf-8") == PAGES[path.name], HINT


def test_no_page_is_left_over():
    assert {path.name for path in FOLDER.iterdir()} <= set(PAGES)


def test_every_setting_is_on_the_page():
    text = PAGES["settings.md"]
    for table in tables_of(Config):
        for field in msgspec.structs.fields(table):
            if table is Config:
                assert f"## `[{field.name}]`" in text
            elif "Config" not in str(settings_of(table)[field.name].hint):
                assert f"| `{field.name}` |" in text


def test_every_argument_of_every_command_is_described():
    found = dict(commands())
    assert len(found) > 10
    for name, function in found.items():
        text, described = described_parameters(function)
        assert text.endswith("."), name
        assert set(described) == set(inspect.signature(function).parameters), name
        assert all(text.endswith(".") for text in described.values()), name
        assert f"## `{name}`" in PAGES["cli.md"]


def test_every_error_is_on_the_page():
    for error in error_classes():
        assert f"* `{error.__name__}`" in PAGES["errors.md"]
    known = {error.__name__ for error in error_classes()}
    strange = set(raisers()) - known
    assert all(hasattr(__builtins__, n) or n in __builtins__ for n in strange), strange
