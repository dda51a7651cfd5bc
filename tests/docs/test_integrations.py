"""The pages about FastDeploy and routers: programs run, and caches open with the settings."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import tomllib

import pytest

import kvactors
from kvactors.settings import Config
from tests.docs.pages import HOW_TO, blocks_of, output_of

BLOCK = re.compile(r"```(python|toml) title=\"([^\"]+)\"\n(.*?)```", re.DOTALL)
STAND_IN = "tests.support.attentionstore_sdk"


def files_of(page):
    text = (HOW_TO / page).read_text("utf-8")
    found = {name: block for _, name, block in BLOCK.findall(text)}
    assert len(found) == len(re.findall(r"^```(?:python|toml)", text, re.MULTILINE)), (
        "no other block"
    )
    return found


FASTDEPLOY, ROUTERS = files_of("fastdeploy.md"), files_of("routers.md")


async def test_a_cache_opens_a_file_store_with_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    async with kvactors.open(tomllib.loads(FASTDEPLOY["file.toml"])) as cache:
        async with await cache.acquire("r", list(range(200))) as lease:
            await lease.finish(200)
        await cache.wait_idle()
        assert cache.statistics().store.writes == 3
    assert (tmp_path / "kv").is_dir()


def test_the_calls_of_a_scheduler_are_made_as_shown(tmp_path):
    output = output_of(FASTDEPLOY["requests.py"], tmp_path, {"PATH": ""})
    assert "first: 0 of 200 tokens are cached, blocks [0, 1, 2, 3]" in output
    assert "second: 192 of 200 tokens are cached, blocks [0, 1, 2, 3]" in output
    assert "5 blocks are free, 16 on the host" in output


def test_the_manager_is_put_in_the_place_of_fastdeploys(tmp_path):
    package = tmp_path / "fastdeploy" / "engine"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.write_text("", "utf-8")
    (package / "resource_manager.py").write_text("class PrefixCacheManager: ...\n", "utf-8")
    setup, _, calls = FASTDEPLOY["requests.py"].partition("manager = PrefixCacheManager(")
    made = calls.partition(", tensors=tensors, environ={})")[2]
    program = "\n".join(
        (
            FASTDEPLOY["install.py"],
            setup,
            "manager = resource_manager.PrefixCacheManager(config, 1, 'mixed', 0)",
            made,
        )
    )
    output = output_of(program, tmp_path, {"PATH": "", "PYTHONPATH": str(tmp_path)})
    assert "second: 192 of 200 tokens are cached" in output


@pytest.mark.parametrize("only_flush", [False, True])
async def test_attention_store_opens_as_store_and_as_index(monkeypatch, only_flush):
    if only_flush:
        monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    data = tomllib.loads(FASTDEPLOY["attention_store.toml"])
    data["attention_store"] = {"sdk": STAND_IN}
    data |= {"device": {"num_blocks": 16}, "host": {"slots": 4}}
    async with kvactors.open(data) as cache:
        async with await cache.acquire("r", list(range(200))) as lease:
            await lease.wait_ready()
            await lease.finish(200)
        await cache.wait_flushed()
        assert len(cache.sinks) == only_flush
        assert (cache.statistics().store is None) == only_flush


def test_the_settings_of_a_fleet_are_valid():
    node, masters = blocks_of(HOW_TO / "fleet.md", "toml")
    config = Config.from_mapping(tomllib.loads(node))
    assert config.storage.backend == "mooncake"
    assert config.storage.mooncake.master_server_address == "10.0.0.1:50051"
    masters = tomllib.loads(masters)["storage"] | {"backend": "mooncake"}
    assert Config.from_mapping({"cache": {"model": "m"}, "storage": masters}).storage.mooncake


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ROUTERS if name.endswith(".toml")])
async def test_a_node_opens_with_the_settings_of_each_router(name):
    data = tomllib.loads(ROUTERS["dynamo.toml"]) | tomllib.loads(ROUTERS[name])
    (sink,) = data["flush"]["sinks"]
    for key in ("endpoint", "replay_endpoint"):
        sink[key] = f"tcp://127.0.0.1:{free_port()}"
    data["device"] = {"num_blocks": 16}
    async with kvactors.open(data) as cache:
        async with await cache.acquire("r", list(range(40))) as lease:
            await lease.finish(40)
        await cache.wait_flushed()
        assert cache.health().status == "ok"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.full
async def test_the_reader_prints_the_events_of_a_request():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    program = ROUTERS["reader.py"].replace("tcp://127.0.0.1:5557", endpoint)
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-c", program, stdout=subprocess.PIPE
    )
    data = tomllib.loads(ROUTERS["dynamo.toml"]) | {"device": {"num_blocks": 16}}
    data["flush"] = {"sinks": [{"kind": "kv_events", "endpoint": endpoint}]}
    try:
        async with kvactors.open(data) as cache:
            printed = asyncio.create_task(stored(reader.stdout))
            for number in range(1000):  # the first ones come before the reader has connected
                async with await cache.acquire("r", [number] * 40) as lease:
                    await lease.finish(40)
                await asyncio.sleep(0.05)
                if printed.done():
                    break
            assert printed.done()
            assert printed.result() == b"BlockStored GPU 2\n"
    finally:
        reader.kill()
        await reader.wait()


async def stored(lines):
    """The first line about a stored block."""
    async for line in lines:
        if line.startswith(b"BlockStored"):
            return line
    raise AssertionError("the reader has ended")
