"""The pages about engines have every setting of the adapters, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvactors.integrations.fastdeploy import FastDeployOptions
from kvactors.integrations.lmcache.settings import L2Settings
from kvactors.integrations.sglang.settings import NO_EFFECT, HiCacheSettings, LinkerSettings
from kvactors.integrations.vllm.settings import OffloadingSettings, TierSettings
from kvactors.tier_cache import TierStorage

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
RANKS = {"rank", "ranks"}
"""The engine's: a user cannot set them."""
CASES = {
    "vllm": (OffloadingSettings, TierSettings, TierStorage),
    "sglang": (HiCacheSettings, LinkerSettings, TierStorage),
    "lmcache": (L2Settings,),
    "fastdeploy": (FastDeployOptions,),
}
ROW = re.compile(r"^\| (`[^|]*`) \| ([^|]*) \|", re.MULTILINE)


def rows(page: str) -> dict[str, set[str]]:
    """The defaults that a page's tables give each key."""
    found: dict[str, set[str]] = {}
    for names, defaults in ROW.findall(page):
        keys = re.findall(r"`(\w+)`", names)
        values = [one.strip(" `") for one in defaults.split(",")]
        for key, value in zip(keys, values * len(keys), strict=False):
            found.setdefault(key, set()).add(value)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_page_has_every_setting_with_its_default(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text("utf-8")
    table = rows(page)
    for struct in CASES[name]:
        for field in msgspec.structs.fields(struct):
            key = field.name
            if key in RANKS:
                continue
            assert f"`{key}`" in page, f"{struct.__name__}.{key}"
            default = field.default
            if key in table and isinstance(default, int | float) and not isinstance(default, bool):
                assert f"{default:g}" in table[key], f"{struct.__name__}.{key}"


def test_settings_without_effect_are_named() -> None:
    page = (PAGES / "sglang.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in NO_EFFECT)
