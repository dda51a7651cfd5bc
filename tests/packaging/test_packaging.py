"""The checks of wheels and of the lowest versions of dependencies."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.packaging.floors import EXTRAS, OF_THE_SOURCES, TESTS, floors
from tests.packaging.wheels import IN_WHEEL, ROOT, missing, unwanted, wheel_for

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WHEELS = (
    Path("kvactors-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl"),
    Path("kvactors-0.1.0-cp313-cp313-manylinux_2_34_x86_64.whl"),
)


def test_every_dependency_has_a_lowest_version():
    found = floors(PROJECT)
    assert len(found) > len(PROJECT["dependencies"])
    assert "cyclopts==4.0" in found
    with pytest.raises(ValueError, match="numpy<3 has no lowest version"):
        floors({"dependencies": ["numpy<3"], "optional-dependencies": dict.fromkeys(EXTRAS, ())})


def test_the_tests_at_the_lowest_versions_exist():
    assert [path for path in (*TESTS, *OF_THE_SOURCES) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("version", "name"), [("3.11", WHEELS[0]), ("3.13", WHEELS[1]), ("3.12", None)]
)
def test_the_wheel_of_a_version(version, name):
    assert wheel_for(WHEELS, version) == wheel_for(iter(WHEELS), version) == name


def test_the_contents_of_an_archive_are_checked():
    assert missing(IN_WHEEL, IN_WHEEL) == unwanted(IN_WHEEL) == []
    assert missing(IN_WHEEL[1:], IN_WHEEL) == [IN_WHEEL[0]]
    strange = ["tests/conftest.py", "kvactors/scenarios/serve_tiny_gpt.py", "docs/index.md"]
    assert unwanted([*IN_WHEEL, *strange]) == sorted(strange)


def test_what_the_package_declares():
    classifiers = PROJECT["classifiers"]
    assert PROJECT["requires-python"] == ">=3.11"
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert (ROOT / "SECURITY.md").exists()
