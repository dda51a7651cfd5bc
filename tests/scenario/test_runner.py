"""Running scenarios: chat and scripts, real and virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvactors.errors import ConfigError
from kvactors.flush_notifier.sinks.kv_wire import MEDIA
from kvactors.scenario.runner import run_scenario, with_temporary
from kvactors.settings import read_toml
from kvactors.settings.valkey import VARIABLES
from tests.flush_notifier.helpers import path_tokens
from tests.support import attentionstore_sdk
from tests.support.announced import announceable
from tests.support.child import child
from tests.support.mirror import compare
from tests.support.s3 import CREDENTIALS, s3_server
from tests.support.valkey import MISSING, PROGRAM, valkey_server

CHAT = {
    "scenario": {"name": "chat", "seed": 5},
    "cache": {"model": "m", "block_size": 4},
    "device": {"num_blocks": 24},
    "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
    "host": {"slots": 24},
    "storage": {"backend": "memory"},
    "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
    "workload": {
        "sessions": 6,
        "turns": 3,
        "concurrency": 2,
        "system_tokens": 8,
        "user_tokens": 6,
        "output_tokens": 4,
    },
}


def script(*steps, **tables):
    config = {key: CHAT[key] for key in ("scenario", "cache", "layout")}
    return {
        **config,
        "device": {"num_blocks": 4},
        "workload": {"kind": "script", "step": list(steps)},
        **tables,
    }


def without_clocks(report):
    fields = msgspec.to_builtins(report)
    del fields["wall_s"]
    return fields


@pytest.mark.parametrize("virtual", [False, True])
def test_chat_hits_every_tier_and_leaves_nothing_wrong(virtual):
    _, report = run_scenario(CHAT, virtual=virtual)
    assert report.requests >= 18
    assert min(report.hit_rate.values()) > 0
    assert report.verified_blocks > 0
    assert (
        report.corrupt_blocks_served,
        report.flush["divergence"],
        report.flush["pending"],
        report.errors,
    ) == (0, 0, 0, [])


def test_a_virtual_run_is_its_seeds():
    [first, again, other] = [
        without_clocks(run_scenario(CHAT, seed=seed, virtual=True)[1]) for seed in (1, 1, 2)
    ]
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "change",
    [
        {"storage": {"backend": "file", "directory": "@temp"}},
        {"flush": {"sinks": [{"kind": "jsonl", "path": "@temp/x"}]}},
    ],
)
def test_virtual_time_has_no_files(change):
    with pytest.raises(ConfigError, match="virtual time"):
        run_scenario({**CHAT, **change}, virtual=True)


def test_a_temporary_folder_is_there_for_the_run_and_gone_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = []
    files = {
        "storage": {"backend": "file", "directory": "@temp"},
        "flush": {"sinks": [{"kind": "jsonl", "path": "@temp/x.jsonl"}]},
    }
    run_scenario(
        {**CHAT, **files}, progress=lambda _: seen.append(len(list(tmp_path.glob("*/x.jsonl"))))
    )
    assert max(seen) == 1
    assert list(tmp_path.iterdir()) == []


def test_only_whole_temp_paths_are_replaced():
    data = {"a": "@temp", "b": ["@temp/x", {"c": "@temperature"}], "d": 1}
    assert with_temporary(data, "/f") == {"a": "/f", "b": ["/f/x", {"c": "@temperature"}], "d": 1}


def test_a_script_that_goes_as_expected():
    _, report = run_scenario(
        script(
            {"do": "acquire", "request": "a", "prompt": 1, "tokens": 12, "cached_tokens": 0},
            {"do": "acquire", "request": "b", "prompt": 2, "tokens": 8, "expect": "NoRoom"},
            {"do": "commit", "request": "a"},
            {"do": "extend", "request": "a", "prompt": 3, "tokens": 9, "expect": "NoRoom"},
            {"do": "finish", "request": "a"},
            {"do": "wait_idle"},
            {"do": "acquire", "request": "a", "prompt": 1, "tokens": 12, "cached_tokens": 8},
            {"do": "preempt", "request": "a", "computed_tokens": 8},
            {"do": "clear"},
            {"do": "acquire", "request": "a", "prompt": 1, "tokens": 12, "cached_tokens": 0},
        )
    )
    assert report.errors == []
    assert (report.requests, report.no_room) == (3, 2)


def test_pause_refuses_until_resume():
    _, report = run_scenario(
        script(
            {"do": "pause"},
            {"do": "acquire", "request": "a", "tokens": 4, "expect": "Paused"},
            {"do": "resume"},
            {"do": "acquire", "request": "a", "tokens": 4},
            cache={"block_size": 4, "default_deadline_s": 0.05},
        )
    )
    assert report.errors == []
    assert report.requests == 1


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        (
            {"do": "acquire", "request": "a", "tokens": 8, "expect": "NoRoom"},
            "workload.step[0] (acquire a): ok, and NoRoom was expected",
        ),
        (
            {"do": "acquire", "request": "a", "tokens": 99},
            "workload.step[0] (acquire a): NeverFits: ",
        ),
        (
            {"do": "acquire", "request": "a", "tokens": 8, "cached_tokens": 4},
            "workload.step[0] (acquire a): cached_tokens is 0, and 4 was expected",
        ),
        (
            {"do": "lookup", "tokens": 8, "hits": (1, 0, 0)},
            "workload.step[0] (lookup): hits is (0, 0, 0), and (1, 0, 0) was expected",
        ),
    ],
)
def test_a_failing_script_reports_its_line(step, complaint):
    _, report = run_scenario(script(step))
    [found] = report.errors
    assert found.startswith(complaint)


SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.toml"))
# Runs for more than a minute: tests/interop/test_fleet.py
OF_ATTENTION_STORE = sorted((Path(__file__).parent / "attention_store").glob("*.toml"))


@asynccontextmanager
async def mirrored(cache):
    """A reader in another process that loses every twentieth message ends equal to the tiers, and
    its events tell any two blocks apart."""
    if "kv_events" not in cache.sinks:
        yield
        return
    sink = cache.sinks["kv_events"].inner
    ends = ("tests.support.mirror", sink.endpoint, sink.replay_endpoint)
    topic = ("--topic", sink.config.topic, "--lose", "0.05")
    async with child("-m", *ends, *topic) as reader:
        await reader.receive()
        yield
        held = {
            MEDIA["vllm"][tier]: {int.from_bytes(key[-8:], "big") for key in keys}
            for tier, keys in announceable(cache.system).items()
        }
        said = await compare(reader, sink.events.sequence, held)
        assert (said["divergence"], said["ambiguous"], said["behind"]) == (0, 0, 0)
        assert said["replayed"] >= 1


@pytest.fixture
def _server(path, monkeypatch):
    """The server that a scenario needs."""
    if path.stem == "s3_outage":
        with s3_server() as server:
            server.request("kvactors-scenario", "PUT")
            place = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1"}
            for name, value in {**place, **CREDENTIALS}.items():
                monkeypatch.setenv(name, value)
            yield
    elif path.stem == "valkey_evicts":
        if PROGRAM is None:
            pytest.skip(MISSING)
        memory = ("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
        with valkey_server(*memory, "--notify-keyspace-events", "Eex") as server:
            monkeypatch.setenv(VARIABLES[0], server.url)
            yield
    else:
        yield


@pytest.mark.full
@pytest.mark.usefixtures("_server")
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_shipped_scenarios_hold(path):
    scenario, report = run_scenario(read_toml(path), observe=mirrored)
    assert report.expectations
    assert scenario.scenario.description
    assert report.failures() == []


@asynccontextmanager
async def index_compared(cache):
    """At the end, AttentionStore's index has exactly the blocks that are resident."""
    yield
    sink = cache.system.sinks["attention_store"].inner
    ledger = cache.system.notifier_actor.ledger
    held = set().union(*announceable(cache.system, sink.filter).values())
    paths = {tuple(np.frombuffer(path_tokens(ledger, key), "<u4").tolist()) for key in held}
    assert paths
    assert paths == sink.sdk.connection.service.resident


@pytest.mark.full
@pytest.mark.parametrize("path", OF_ATTENTION_STORE, ids=lambda path: path.stem)
def test_scenarios_of_attention_store_hold(path):
    attentionstore_sdk.reset()
    _, report = run_scenario(read_toml(path), observe=index_compared)
    attentionstore_sdk.reset()
    assert report.failures() == []


def slowly(seconds: float, *, settle: bool):
    """The report of a chat whose store takes so much longer for each call, in virtual time."""
    workload = {**CHAT["workload"], "settle": settle, "turns": 4, "concurrency": 1}
    fault = [{"storage": True, "kind": "slow", "delay": seconds, "turn": 1}]
    slots = {"slots": 8, "transit_slots": 64}
    storage = {"backend": "memory", "write_policy": "write_back", "timeout_s": 1000.0}
    cache = {**CHAT["cache"], "default_deadline_s": 1000.0}
    data = {
        **CHAT,
        "cache": cache,
        "host": slots,
        "storage": storage,
        "workload": workload,
        "fault": fault,
    }
    return run_scenario(data, virtual=True)[1]


def test_the_hits_of_a_settled_chat_do_not_depend_on_the_disk():
    fast, slow = slowly(0.0, settle=True), slowly(3.0, settle=True)
    assert fast.hit_rate["total"] == slow.hit_rate["total"]
    assert min(fast.hit_rate["storage"], slow.hit_rate["storage"]) > 0.4
    assert slow.errors == []
    assert slowly(3.0, settle=False).hit_rate["storage"] < 0.4, (
        "the same without settling: this proves nothing"
    )


def test_a_fault_may_last_for_some_turns():
    fault = [{"storage": True, "kind": "full", "turn": 2, "turns": 1}]
    workload = {**CHAT["workload"], "settle": True, "turns": 4}
    storage = {"backend": "memory", "write_policy": "write_through"}
    _, report = run_scenario(
        {**CHAT, "storage": storage, "workload": workload, "fault": fault}, virtual=True
    )
    assert report.storage["no_space"] > 0
    assert report.storage["writes"] > 0
    assert [one.what for one in report.events] == ["storage: full", "storage: full ended"]
    fault = [{"sink": "memory", "kind": "down", "turn": 1, "turns": 2}]
    _, report = run_scenario({**CHAT, "workload": workload, "fault": fault}, virtual=True)
    assert report.sinks["memory"]["retried"] > 0
    assert report.flush["divergence"] == report.flush["pending"] == 0
