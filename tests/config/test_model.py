"""`cache.model`: when it must be set, and where it is taken from."""

from __future__ import annotations

import pytest

from kvactors.errors import ConfigError
from kvactors.settings import Config

MOONCAKE = {
    "backend": "mooncake",
    "mooncake": {"master_server_address": "10.0.0.1:1"},
    "write_policy": "write_through",
}
SHARED = [
    {"storage": {"backend": "file", "directory": "/x"}},
    {"storage": MOONCAKE},
    {"storage": {"backend": "attention_store", "write_policy": "write_through"}},
    {"storage": {"backend": "package.module:Class"}},
    {"flush": {"sinks": [{"kind": "attention_store"}]}},
    {
        "flush": {
            "mode": "flush_only",
            "sinks": [{"kind": "memory"}, {"kind": "attention_store", "name": "as"}],
        }
    },
]
PRIVATE = [
    {},
    {"storage": {"backend": "memory"}},
    {"flush": {"mode": "flush_only"}, "storage": {"backend": "file", "directory": "/x"}},
    {"flush": {"sinks": [{"kind": "memory"}, {"kind": "jsonl", "path": "/x"}]}},
]


def opened(tables, environ=None, **cache):
    """The settings as `open` completes them."""
    return Config.from_env(environ or {}, Config.from_mapping({"cache": cache, **tables}))


@pytest.mark.parametrize("tables", SHARED)
def test_storage_and_sinks_need_a_model(tables):
    with pytest.raises(
        ConfigError,
        match=r"cache\.model is needed with (storage\.backend|flush\.sinks) .*KVACTORS_MODEL",
    ):
        opened(tables)
    assert opened(tables, model="m").cache.model == "m"
    assert opened(tables, {"KVACTORS_MODEL": "m"}).cache.model == "m"
    assert opened(tables, {"AS_NAMESPACE": "m"}).cache.model == "m/v0"


@pytest.mark.parametrize("tables", PRIVATE)
def test_a_cache_without_storage_and_sinks_needs_no_model(tables):
    assert opened(tables).cache.model == ""


@pytest.mark.parametrize(
    ("cache", "table", "environ", "model"),
    [
        ({"model": "a"}, {"namespace": "b"}, {"KVACTORS_MODEL": "c", "AS_NAMESPACE": "d"}, "a"),
        ({}, {"namespace": "b"}, {"KVACTORS_MODEL": "c", "AS_NAMESPACE": "d"}, "c"),
        ({}, {"namespace": "b"}, {"AS_NAMESPACE": "d"}, "b/v0"),
        ({}, {}, {"AS_NAMESPACE": "d"}, "d/v0"),
        ({}, {"namespace": "b"}, {}, "b/v0"),
        ({}, {"model_version": "b"}, {}, "default_ns/b"),
        ({}, {}, {"AS_MODEL_VERSION": "7", "AS_NAMESPACE": "x/y"}, "x%2Fy/7"),
    ],
)
def test_the_order_in_which_a_model_is_looked_for(cache, table, environ, model):
    tables = {"attention_store": table} if table else {}
    assert (
        opened(
            {**tables, "flush": {"sinks": [{"kind": "attention_store"}]}}, environ, **cache
        ).cache.model
        == model
    )
