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


def names_in(column: int) -> set[str]:
    """The code in a column of the page's tables, without arguments and values."""
    rows = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line[:2] == "| "]
    cells = " ".join(row[column] for row in rows if len(row) > column)
    return {re.split(r"[ (=]", code)[0] for code in re.findall(r"`([^`]+)`", cells)}


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
        for name in names_in(1) | names_in(2)
        if not (resolves(statistics, name) or resolves(settings, name))
        and name not in known | values | other
    }
    assert unknown == set()
