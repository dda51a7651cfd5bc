"""Names in the page about tuning exist: statistics, settings, methods."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

import kvactors
from kvactors.cache import KVCache
from kvactors.flush_notifier.deliver import SinkStatistics
from kvactors.settings import Config
from tests.support.cache import opened

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "tune.md"
HOST = {"slots": 8, "transit_slots": 16}
STORE = {"backend": "memory", "write_policy": "write_through"}


def names() -> set[str]:
    """The code in the page's lists, without arguments and values."""
    items = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("* ")]
    return {re.split(r"[ (=]", code)[0] for code in re.findall(r"`([^`]+)`", " ".join(items))}


def resolves(table: object, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(table, dict) or part not in table:
            return False
        table = table[part]
    return True


async def test_every_name_exists():
    async with opened(host=HOST, storage=STORE) as cache:
        statistics = cache.statistics().as_dict()
    settings = msgspec.to_builtins(Config())
    used = {"storage": ["capacity_bytes"], "host": ["mode"], "cache": ["prefill_tokens_per_s"]}
    for table, keys in used.items():
        fields = {field.name for field in msgspec.structs.fields(type(getattr(Config(), table)))}
        assert fields.issuperset(keys)
        settings[table] = dict.fromkeys(fields)
    settings["device"] = {"num_blocks": 0}
    methods = {f"cache.{name}" for name in dir(KVCache)} | {
        f"lease.{name}" for name in dir(kvactors.Lease)
    }
    known = {*SinkStatistics._fields, *methods, *dir(KVCache), *dir(kvactors), "flush"}
    values = {"inclusive", "exclusive", "write_through_selective", "wait_for_room", "kvactors"}
    other = {"computed_tokens", "finish"}
    unknown = {
        name
        for name in names()
        if not (resolves(statistics, name) or resolves(settings, name))
        and name not in known | values | other
    }
    assert unknown == set()
