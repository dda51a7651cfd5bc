"""`config check`, `config show` and `config schema`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

import kvactors
from kvactors.errors import ConfigError
from kvactors.settings import Config
from kvactors.settings.check import bounds, choices, settings_of
from kvactors.settings.schema import field_docs, json_schema, tables_of
from kvactors.settings_report import as_toml, check_file, config_schema, effective, kind_of

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "scenarios").glob("*.toml"), *(ROOT / "scenarios").glob("*/*.toml")])

WRONG = """
[cache]
block_size = 0
modle = "x"
[device]
kind = "cdua"
low_watermark = 2
[layuot]
[host]
slots = "8 GiB"
[flush]
sinks = [{ kind = "memory", granularity = "node" }, { kind = "kvevents" }, { kind = "jsonl", path = 5 }]
"""
CONTRADICTING = """
[device]
num_blocks = 4
capacity_bytes = "1 MB"
low_watermark = 0.9
high_watermark = 0.5
place = "gpu:0"
[layout]
kind = "mqa"
[storage]
rank = 3
"""


def write(folder, text):
    path = folder / "c.toml"
    path.write_text(text)
    return path


def test_every_fault_of_a_file_is_found(tmp_path):
    found = check_file(write(tmp_path, WRONG), {})
    expected = (
        "cache.block_size must be at least 1, not 0 (allowed: 1 to 16384)",
        "unknown key 'cache.modle'. Did you mean 'model'? There are block_size, model",
        "unknown device.kind 'cdua'. Did you mean 'cuda'? There are host, paddle, cuda",
        "device.low_watermark must be at most 1, not 2 (allowed: 0 to 1)",
        "unknown key 'layuot'. Did you mean 'layout'?",
        "host.slots must be a whole number, 0 to 2147483648, not '8 GiB'",
        "unknown flush.sinks[1].kind 'kvevents'. Did you mean 'kv_events'?",
        "flush.sinks[2].path must be a text, not 5",
    )
    assert len(found.faults) == len(expected)
    for fault, text in zip(sorted(found.faults), sorted(expected), strict=True):
        assert fault.startswith(text)
    assert found.notes == []


def test_every_contradiction_of_a_file_is_found(tmp_path):
    found = check_file(write(tmp_path, CONTRADICTING), {}).faults
    starts = (
        "device.num_blocks = 4 and device.capacity_bytes",
        "unknown layout.kind 'mqa'",
        "device.place has no use with device.kind 'host'",
        "0 <= device.low_watermark <= device.high_watermark",
        "storage.rank must be below storage.ranks (1)",
    )
    assert len(found) == len(starts)
    assert all(fault.startswith(text) for fault, text in zip(found, starts, strict=True))


@pytest.mark.parametrize(
    ("text", "environ", "fault"),
    [
        ("[storage]\nbackend = 'file'\ndirectory = '/x'", {}, "cache.model is needed"),
        ("", {"AS_WRITE_SLICE_BLOCK_NUM": "0"}, "AS_WRITE_SLICE_BLOCK_NUM"),
        ("[layout]\nnum_kv_heads = 3\ntensor_parallel = 2", {}, "3 KV heads cannot be shared"),
        ("[layout]\nhead_dim = [8, 16]", {}, "head_dim has 2 entries, and there are 4 layers"),
        ("[device]\ncapacity_bytes = 5", {}, "device.capacity_bytes is 5 B"),
        ("[cache", {}, "at end of document"),
        ("[scenario]\nname = 's'\n[workload]\nturns = 0", {}, "turns"),
        ("[workload]\nturns = 2", {}, "scenario is missing"),
        ("[replay]\nspeed = -1.0", {}, "replay.speed"),
    ],
)
def test_faults_that_the_file_shows_only_as_a_whole(tmp_path, text, environ, fault):
    (found,) = check_file(write(tmp_path, text), environ).faults
    assert fault in found


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_the_files_of_this_repository_are_right(path):
    assert check_file(path, {}).faults == []


def test_each_setting_is_shown_with_its_origin(tmp_path):
    data = tomllib.loads("[cache]\nblock_size = 16\n[storage]\nbackend = 'file'\n")
    environ = {
        "KVACTORS_MODEL": "m",
        "FILE_BACKEND_STORAGE_DIR": "/x",
        "FD_AS_ONLY_FLUSH": "0",
        "AS_POD_NAME": "",
    }
    found = {one.name: (one.value, one.origin) for one in effective(data, environ)}
    assert found["cache.block_size"] == (16, "file")
    assert found["cache.namespace"] == ("default", "default")
    assert found["cache.model"] == ("m", "KVACTORS_MODEL")
    assert found["storage.directory"] == ("/x", "FILE_BACKEND_STORAGE_DIR")
    assert found["flush.mode"] == ("normal", "FD_AS_ONLY_FLUSH")
    assert found["storage.mooncake.protocol"][1] == "", "no use with a file store"
    assert found["storage.readers"][1] == "default"


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"device": {"capacity_bytes": "8 GiB"}, "host": {"capacity_bytes": 1 << 20}},
        {
            "cache": {"model": 'a "quoted" \\ name\n'},
            "layout": {"kind": "mla"},
            "storage": {"backend": "file", "directory": "/x", "capacity_bytes": "4GB"},
            "flush": {"sinks": [{"kind": "memory"}, {"kind": "kv_events", "topic": "kv"}]},
        },
        {
            "cache": {"model": "m"},
            "storage": {"backend": "mooncake", "mooncake": {"master_server_address": "m:1"}},
        },
    ],
)
def test_shown_settings_can_be_read_again(data):
    config = Config.from_env({}, Config.from_mapping(data))
    assert Config.from_mapping(tomllib.loads(as_toml(effective(data, {})))) == config


def test_a_secret_is_not_shown():
    data = {
        "cache": {"model": "m"},
        "layout": {"tensor_parallel": 2},
        "ranks": {"count": 2, "endpoint": "tcp://127.0.0.1:5", "secret": "x" * 20},
        "storage": {"backend": "valkey", "valkey": {"url": f"valkey://u:{'x' * 20}@h"}},
    }
    text = as_toml(effective(data, {}))
    assert "x" * 20 not in text
    assert 'secret = "<set>"  # file' in text
    assert 'url = "<set>"  # file' in text


def test_the_schema_has_every_setting_with_its_description_and_range():
    schema = json_schema()
    tables = tables_of(Config)
    assert len(tables) > 12
    for struct in tables:
        docs, settings = field_docs(struct), settings_of(struct)
        properties = schema["$defs"][struct.__name__]["properties"]
        if struct is Config:
            continue
        assert [name for name, text in docs.items() if not text] == [], struct.__name__
        for name, text in docs.items():
            prop = properties[name]
            assert prop["description"] == text
            plain = json.dumps(prop)
            assert bool(bounds(settings[name].hint)) == ("aximum" in plain), name
            assert all(f'"{choice}"' in plain for choice in choices(settings[name].hint))
        assert schema["$defs"][struct.__name__]["additionalProperties"] is False


@pytest.mark.parametrize("kind", ["settings", "scenario", "replay"])
def test_a_schema_takes_the_files_of_the_package_and_describes_every_field(kind, capfd):
    config_schema(kind)
    schema = json.loads(capfd.readouterr().out)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for path in FILES:
        data = tomllib.loads(path.read_text("utf-8"))
        if kind_of(data)[0] == kind:
            assert list(validator.iter_errors(data)) == [], path
    if kind == "scenario":
        step = {"do": "finish", "request": "a", "tokens": 1}
        wrong = {"scenario": {"name": "s"}, "workload": {"kind": "script", "step": [step]}}
        assert list(validator.iter_errors(wrong))
        nested = {"scenario": {"name": "s"}, "expect": {"hit_rate": {"host": {"min": 0.1}}}}
        assert list(validator.iter_errors(nested)) == []
    for name, table in schema["$defs"].items():
        if not name.endswith(("Config", "Scenario")):
            missing = {
                one for one, prop in table["properties"].items() if "description" not in prop
            }
            assert missing <= {"do"}, name


async def test_open_takes_a_mapping_and_a_path(tmp_path):
    path = write(tmp_path, "[cache]\nblock_size = 4\n[device]\nnum_blocks = 9\n")
    for given in (path, str(path), tomllib.loads(path.read_text())):
        async with kvactors.open(given) as cache:
            assert (cache.block_size, cache.device.num_blocks) == (4, 9)
    for wrong, error in (({"cash": {}}, ConfigError), (tmp_path / "none.toml", FileNotFoundError)):
        with pytest.raises(error):
            async with kvactors.open(wrong):
                pass


STORED = """
[cache]
model = "m"
block_size = 16
[host]
slots = 4
[storage]
"""


@pytest.mark.parametrize(
    ("storage", "size"),
    [
        ("backend = 'file'\ndirectory = '/x'\ncapacity_blocks = 3", "3 blocks, 48 tokens, 48 KiB"),
        (
            "backend = 'file'\ndirectory = '/x'\ncapacity_bytes = '1 MiB'\ncapacity_blocks = 1000",
            "64 blocks, 1,024 tokens, 1 MiB",
        ),
        ("backend = 'file'\ndirectory = '/x'", "80 % of the space that the file system can give"),
        ("backend = 'memory'", "no limit is set for memory"),
    ],
)
def test_the_size_of_the_store_is_shown_beside_the_others(tmp_path, storage, size):
    found = check_file(write(tmp_path, STORED + storage), {})
    assert found.faults == []
    tiers = [note.partition(":")[0] for note in found.notes]
    assert tiers == ["device", "host", "transit", "storage"]
    assert found.notes[-1] == f"storage: {size}"


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        ("[layout]\nkind = 'no_such_package.x:Layout'", "layout"),
        ("[storage]\nbackend = 'no_such_package.x:Store'", "storage.backend"),
        ("[[flush.sinks]]\nkind = 'no_such_package.x:Sink'", "flush.sinks"),
    ],
)
def test_a_class_that_is_not_there_is_a_fault(tmp_path, table, setting):
    (found,) = check_file(write(tmp_path, "[cache]\nmodel = 'm'\n" + table), {}).faults
    assert found.startswith(setting)
    assert "no_such_package.x:" in found
    assert "cannot be imported" in found
    assert found.endswith("Install its package, or name its folder in PYTHONPATH")
