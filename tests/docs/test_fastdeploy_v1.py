"""The page about the interface of FastDeploy's cache manager v1 has every name that is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvactors.integrations.fastdeploy import CacheController, CacheManager
from tests.integrations.fastdeploy.config import make_config

PAGE = (Path(__file__).parents[2] / "docs" / "fastdeploy_v1.md").read_text("utf-8")
NAMES = re.compile(r"^(?:As in FastDeploy:|Only in kvactors:|\| `)[^|]*", re.MULTILINE)
"""A list of names, or the first cell of a row."""


def made(kind: type) -> Any:
    config = make_config(8, 4)
    return CacheManager(config, environ={}) if kind is CacheManager else kind(config, 0, 0)


@pytest.mark.parametrize("kind", [CacheManager, CacheController])
def test_the_page_says_which_names_are_there(kind: type) -> None:
    section = PAGE.split(f"\n## {kind.__name__}\n")[1].split("\n## ")[0]
    named = {name for part in NAMES.findall(section) for name in re.findall(r"`(\w+)`", part)}
    one = made(kind)
    there = {name for name in dir(one) if not name.startswith("_")}
    assert there == named
