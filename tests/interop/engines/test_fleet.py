"""Two vLLM servers with kvactors behind vLLM's router: a prompt goes to the server whose host tier
has it, though the device has evicted it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.interop.consumers.base import wait_until
from tests.interop.engines.fleet import START, FleetRouter, Server, post
from tests.interop.engines.tiny_llama import write_model
from tests.interop.environments import Environments
from tests.interop.network import raise_loopback

pytestmark = pytest.mark.engines_full

PROMPTS = 5
"""For each server: 45 blocks, more than its device holds."""
LENGTH, CACHED = 288, 256
"""Tokens of a prompt, and those that must come from the host tier at least."""
SERVED, HITS = "vllm:request_success_total", "vllm:external_prefix_cache_hits_total"
CHUNKS = "vllm:kv_offload_tiering_chunk_hits_total"


def prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, 1000) for _ in range(length)]


def follow(router: FleetRouter, server: Server, draw: random.Random) -> None:
    """Serve prompts until the router has the events of a server. Its first live batch shows the
    router that there were earlier ones, which it asks for then."""

    def known() -> bool:
        each = prompt(draw, 96)
        post(server.url, each)
        return router.route(each) >= 64

    wait_until(f"the router has the blocks of {server.url}", known, START)


def test_prompts_go_where_their_blocks_are(environments: Environments, tmp_path: Path) -> None:
    raise_loopback()
    model = write_model(tmp_path / "model")
    servers = [Server(environments, model, tmp_path, port) for port in (18210, 18220)]
    children = [server.child for server in servers]
    try:
        for server in servers:
            server.wait()
        draw = random.Random(9)
        home = {server.url: [prompt(draw, LENGTH) for _ in range(PROMPTS)] for server in servers}
        for server in servers:
            for each in home[server.url]:
                post(server.url, each)
        router = FleetRouter(environments, tmp_path, servers)
        children.append(router.child)
        router.wait()
        for server in servers:
            follow(router, server, draw)
        routed, cached = [], []
        for index in range(PROMPTS):
            for server in servers:
                served, hits = server.metric(SERVED), server.metric(HITS)
                router.route([*home[server.url][index], 7])
                routed.append(server.metric(SERVED) - served)
                cached.append(server.metric(HITS) - hits)
        print(f"{routed.count(1)} of {len(routed)} sent home, tokens from the host tier: {cached}")
        assert set(routed) == {1}
        assert min(cached) >= CACHED
        for server in servers:
            assert server.metric(CHUNKS) >= PROMPTS * CACHED // 32
    finally:
        for child in children:
            child.close()
