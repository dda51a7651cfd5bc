"""The checks of wheels and of the lowest versions of dependencies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.packaging.floors import EXTRAS, OF_THE_SOURCES, TESTS, floors
from tests.packaging.install_lines import install_lines
from tests.packaging.wheels import IN_WHEEL, ROOT, missing, unwanted, wheel_for

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WHEELS = (
    Path("kvactors-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl"),
    Path("kvactors-0.1.0-cp312-abi3-manylinux_2_34_x86_64.whl"),
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
    ("version", "name"), [("3.11", WHEELS[0]), ("3.12", WHEELS[1]), ("3.13", WHEELS[1])]
)
def test_the_wheel_of_a_version(version, name):
    assert wheel_for(WHEELS, version) == name
    assert wheel_for([one for one in WHEELS if one != name], version) is None


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


def test_a_version_has_a_section_in_the_changelog_and_stands_in_one_place():
    version = PROJECT["version"]
    first = re.search(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert first is not None
    assert re.fullmatch(rf"{re.escape(version)}, (not released|\d{{4}}-\d\d-\d\d)", first[1])
    places = [
        file
        for file in (ROOT / "kvactors").rglob("*.py")
        if f'"{version}"' in file.read_text("utf-8")
    ]
    assert places == []


def test_every_install_line_has_one_form_and_names_extras_that_exist():
    lines = install_lines()
    assert len(lines) > 15
    extras = PROJECT["optional-dependencies"]
    wrong = [
        f"{line.file}: {line.text}"
        for line in lines
        if not line.good or not set(line.extras) <= {*extras, "{extra}"}
    ]
    assert wrong == []


def test_the_page_of_releases_has_the_ranges_of_the_engines():
    page = (ROOT / "docs" / "how-to" / "upgrade.md").read_text("utf-8")
    extras = PROJECT["optional-dependencies"]
    ranges = [
        one
        for name in ("vllm", "sglang", "lmcache", "paddle", "paddle-gpu")
        for one in extras[name]
    ]
    assert [one for one in ranges if f"`{one}`" not in page] == []
