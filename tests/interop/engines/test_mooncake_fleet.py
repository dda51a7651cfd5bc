"""Two vLLM servers with kvactors over one Mooncake pool behind vLLM's router: a prompt that one
computed is a hit on the other, with the same tokens, also after the pool's master was killed."""

from __future__ import annotations

import random
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvactors.testing.mooncake_master import Master, master
from tests.interop.consumers.base import wait_until
from tests.interop.engines.fleet import START, FleetRouter, Server, complete, post
from tests.interop.engines.test_fleet import HITS, LENGTH, SERVED, prompt
from tests.interop.engines.tiny_llama import write_model
from tests.interop.environments import Environments
from tests.interop.network import raise_loopback

pytestmark = pytest.mark.engines_full

PROMPTS = 4
CACHED = 256
"""Tokens of a prompt that must come from the pool at least."""
CHUNKS = LENGTH // 32 - 1
"""Objects that the pool has of a prompt at least."""


def pool(address: str) -> dict[str, object]:
    """Settings of the storage."""
    mooncake = {
        "master_server_address": address,
        "local_hostname": "127.0.0.1",
        "global_segment_size": "128MB",
        "local_buffer_size": "16MB",
        "timeout_s": 1.0,
        "connect_timeout_s": 300.0,
    }
    return {"backend": "mooncake", "timeout_s": 60.0, "mooncake": mooncake}


def objects(one: Master) -> float:
    """Objects of the pool."""
    with urllib.request.urlopen(f"http://127.0.0.1:{one.metrics_port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("master_key_count "):
                return float(line.split()[1])
    raise AssertionError("the master has no master_key_count")


@contextmanager
def load(servers: list[Server], want: dict[tuple[int, ...], list[int]]) -> Iterator[list[str]]:
    """Servers complete prompts of which the tokens are known while the block runs. Gives the
    errors, and wrong answers."""
    wrong: list[str] = []
    ended = threading.Event()

    def run(server: Server) -> None:
        while not ended.is_set():
            for tokens, expected in want.items():
                try:
                    found = complete(server.port, tokens)
                except OSError as error:
                    wrong.append(f"{server.url}: {error!r}")
                    return
                if found != expected:
                    wrong.append(f"{server.url}: {found}, expected {expected}")

    threads = [threading.Thread(target=run, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_prompt_of_one_server_is_a_hit_on_the_other(
    environments: Environments, tmp_path: Path
) -> None:
    raise_loopback()
    model = write_model(tmp_path / "model")
    with master() as one:
        servers = [
            Server(environments, model, tmp_path, port, pool(one.address), "vllm_pool")
            for port in (18210, 18220)
        ]
        children = [server.child for server in servers]
        try:
            for server in servers:
                server.wait()
            first, second = servers
            draw = random.Random(11)
            want: dict[tuple[int, ...], list[int]] = {}
            for _ in range(PROMPTS):
                tokens = tuple(prompt(draw, LENGTH))
                want[tokens] = complete(first.port, tokens)
            wait_until("the pool has the prompts", lambda: objects(one) >= PROMPTS * CHUNKS, START)
            cached = []
            for tokens, expected in want.items():
                hits = second.metric(HITS)
                assert complete(second.port, tokens) == expected
                cached.append(second.metric(HITS) - hits)
            print(f"tokens that the second server had from the pool: {cached}")
            assert min(cached) >= CACHED

            router = FleetRouter(environments, tmp_path, servers)
            children.append(router.child)
            router.wait()
            before = sum(server.metric(SERVED) for server in servers)
            for tokens in want:
                router.route([*tokens, 7])
            assert sum(server.metric(SERVED) for server in servers) == before + PROMPTS

            with load(servers, want) as wrong:
                one.kill()
                for _ in range(PROMPTS):
                    post(first.port, prompt(draw, LENGTH))
                one.start()

                def shared() -> bool:
                    """Whether a new prompt of the first server is a hit on the second."""
                    tokens = prompt(draw, LENGTH)
                    expected = complete(first.port, tokens)
                    hits = second.metric(HITS)
                    assert complete(second.port, tokens) == expected
                    return second.metric(HITS) - hits >= CACHED

                wait_until("the pool serves again", shared, START)
            assert wrong == []
        finally:
            for child in children:
                child.close()
