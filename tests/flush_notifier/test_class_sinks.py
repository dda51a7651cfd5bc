"""Sinks of other packages, named in settings by their module path."""

from __future__ import annotations

import jsonschema
import msgspec
import pytest

import kvactors
from kvactors import Config, ConfigError, open_tiers
from kvactors.flush_notifier.sinks import MemorySink, Sink
from kvactors.settings.schema import json_schema
from tests.support.cache import opened, prompt, serve, settings

PATH = f"{__name__}:CountingSink"


class CountingSink(MemorySink):
    """Takes an option."""

    made: list[CountingSink] = []  # noqa: RUF012

    def __init__(self, config, block_size):
        super().__init__(config, block_size)
        self.options = config.options
        CountingSink.made.append(self)


class NoSettings(Sink):
    def __init__(self):
        super().__init__("x")


class NotASink:
    pass


async def test_a_class_in_toml_is_made_with_its_options():
    table = {"kind": PATH, "tiers": ["device"], "options": {"url": "http://index", "depth": 3}}
    async with opened(device=16, sinks=[table]) as cache:
        sink = cache.sinks["CountingSink"]
        assert isinstance(sink, CountingSink)
        assert sink.options == {"url": "http://index", "depth": 3}
        assert sink.block_size == cache.block_size
        await serve(cache, "r", prompt(1, 3))
        await cache.wait_flushed()
        assert len(sink.live_view[kvactors.Tier.DEVICE]) >= 3


def test_a_file_and_its_resolved_form_agree(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        f"""
        [cache]
        model = "m"
        [[flush.sinks]]
        kind = "{PATH}"
        name = "mine"
        [flush.sinks.options]
        url = "u"
        """
    )
    config = Config.from_toml(path)
    assert config.flush.sinks[0].label == "mine"
    again = Config.from_mapping(msgspec.to_builtins(config))
    assert again.flush.sinks == config.flush.sinks


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("kvactors_no_such_package:Sink", "cannot be imported"),
        (f"{__name__}:NoSuchClass", "cannot be imported"),
        (f"{__name__}:NotASink", "is not a Sink"),
        (f"{__name__}:NoSettings", "cannot be made"),
        (":Sink", "must be package.module:Class"),
        ("module:", "must be package.module:Class"),
    ],
)
async def test_a_class_that_cannot_be_used_is_named(kind, complaint):
    with pytest.raises(ConfigError, match=complaint):
        async with kvactors.open(settings(sinks=[{"kind": kind}])):
            pass


def test_an_unknown_kind_lists_the_form_of_a_class():
    with pytest.raises(ConfigError, match=r"package\.module:Class"):
        settings(sinks=[{"kind": "no_such_sink"}])


def test_a_tier_cache_takes_a_class_too():
    cache = open_tiers(
        {
            "model": "m",
            "block_bytes": 96,
            "num_slots": 4,
            "tokens_per_block": 4,
            "sinks": [{"kind": PATH, "options": {"url": "u"}}],
        }
    )
    cache.shutdown()
    assert CountingSink.made[-1].options == {"url": "u"}


def test_the_schema_of_settings_accepts_a_class():
    schema = json_schema()
    for kind, fits in ((PATH, True), ("memory", True), ("no_such_sink", False)):
        validator = jsonschema.Draft202012Validator(schema)
        assert validator.is_valid({"flush": {"sinks": [{"kind": kind}]}}) is fits
