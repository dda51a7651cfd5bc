"""Two vLLM servers with kvactors over one Mooncake pool behind vLLM's router: a prompt that one
computed is a hit on the other, with the same tokens, before and after its master is killed."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.interop.engines.fleet import ROUTER, START, FleetRouter, Server, sampled
from tests.interop.engines.tiny_llama import write_model
from tests.interop.environments import Environments
from tests.interop.processes import call, wait_until
from tests.support.masters import Master

pytestmark = pytest.mark.engines

PROMPTS = 4
"""36 blocks, more than a device holds."""
LENGTH, CACHED = 288, 256
"""Tokens of a prompt, and those that must come from the pool at least."""
SERVED, HITS = "vllm:request_success_total", "vllm:external_prefix_cache_hits_total"
CHUNKS = LENGTH // 32 - 1
"""Objects that the pool has of a prompt at least."""
HEALTHY = "vllm:kv_offload_healthy"
CLIENTS = 2
"""Of the router, each with one request at a time."""


def storage(address: str) -> dict[str, object]:
    """Settings of a server's storage. `address`: of the pool's master."""
    mooncake = {
        "master_server_address": address,
        "local_hostname": "127.0.0.1",
        "global_segment_size": "128MB",
        "local_buffer_size": "16MB",
        "timeout_s": 1.0,
        "connect_timeout_s": 300.0,
    }
    return {"backend": "mooncake", "timeout_s": 20.0, "mooncake": mooncake}


def objects(one: Master) -> float:
    """Objects of the pool."""
    text = call(f"http://127.0.0.1:{one.metrics_port}/metrics").decode()
    (line,) = (line for line in text.splitlines() if line.startswith("master_key_count "))
    return float(line.split()[1])


class Load(NamedTuple):
    """Answers and errors of the clients of the router.

    Attributes:
        served: seconds that each answer took.
        wrong: answers with other tokens than without a cache.
        refused: requests that failed.
    """

    served: list[float]
    wrong: list[str]
    refused: list[str]


@contextmanager
def load(want: dict[tuple[int, ...], list[int]]) -> Iterator[Load]:
    """Clients of the router complete prompts of which the tokens are known while the block runs."""
    found = Load([], [], [])
    ended = threading.Event()

    def run(first: int) -> None:
        for tokens in itertools.islice(itertools.cycle(list(want)), first, None):
            if ended.is_set():
                return
            begun = time.monotonic()
            try:
                answer = sampled(ROUTER, tokens)
            except OSError as error:
                found.refused.append(repr(error))
                ended.wait(0.2)
                continue
            found.served.append(time.monotonic() - begun)
            if answer != want[tokens]:
                found.wrong.append(f"{answer}, expected {want[tokens]}")

    threads = [threading.Thread(target=run, args=(first,)) for first in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        ended.set()
        for thread in threads:
            thread.join()


class Pair:
    """Two servers over a pool. `master`: of the pool."""

    def __init__(self, master: Master, servers: list[Server]) -> None:
        self.master = master
        self.first, self.second = servers
        self._draw = random.Random(11)

    def fresh(self) -> list[int]:
        """A prompt that no server has seen."""
        return [self._draw.randrange(3, 1000) for _ in range(LENGTH)]

    def shares(self) -> bool:
        """Whether a new prompt of the first server is a hit on the second, with the same tokens."""
        tokens = self.fresh()
        expected = sampled(self.first.url, tokens)
        hits = self.second.metric(HITS)
        assert sampled(self.second.url, tokens) == expected
        return self.second.metric(HITS) - hits >= CACHED

    def degraded(self, server: Server) -> bool:
        """Whether a server that serves shows that its pool does not work."""
        sampled(server.url, self.fresh())
        return server.metric(HEALTHY) == 0

    def recovered(self) -> bool:
        """Whether the pool is used again."""
        return self.shares() and all(
            server.metric(HEALTHY) == 1 for server in (self.first, self.second)
        )

    def lose_master(self) -> None:
        """Kill the master, and wait until a server shows it. Start it, and wait until both servers
        use the pool."""
        begun = time.monotonic()
        self.master.kill()
        wait_until("degraded", lambda: self.degraded(self.first), START)
        print(f"degraded after {time.monotonic() - begun:.1f} s")
        begun = time.monotonic()
        self.master.start()
        wait_until("the pool serves again", self.recovered, START)
        print(f"recovered after {time.monotonic() - begun:.1f} s")


@pytest.fixture
def pair(environments: Environments, tmp_path: Path) -> Iterator[tuple[Pair, FleetRouter]]:
    """Two servers that answer, and their router."""
    model = write_model(tmp_path / "model")
    master = Master()
    with ExitStack() as ends:
        ends.callback(master.kill)
        master.start()
        settings = storage(master.address)
        servers = [Server(environments, model, tmp_path, port, settings) for port in (18210, 18220)]
        for server in servers:
            ends.callback(server.child.close)
        for server in servers:
            server.wait()
        router = FleetRouter(environments, tmp_path, servers)
        ends.callback(router.child.close)
        router.wait()
        yield Pair(master, servers), router


def test_a_prompt_of_one_server_is_a_hit_on_the_other(pair: tuple[Pair, FleetRouter]) -> None:
    """Faults cost hits. Every answer has the tokens that a server without a cache samples, and
    none is refused while its server runs."""
    both, router = pair
    first, second = both.first, both.second
    fresh = [tuple(both.fresh()) for _ in range(PROMPTS)]
    want = {tokens: sampled(first.url, tokens) for tokens in fresh}
    assert first.metric(HITS) == 0, "the tokens are those of a server without a cache"
    wait_until("the pool has the prompts", lambda: objects(both.master) >= PROMPTS * CHUNKS, START)
    cached = []
    for prompt_tokens, expected in want.items():
        hits = second.metric(HITS)
        assert sampled(second.url, prompt_tokens) == expected
        cached.append(second.metric(HITS) - hits)
    print(f"tokens that the second server had from the pool: {cached}")
    assert min(cached) >= CACHED
    # the router has decoded the events of the tiers below both devices
    credited = [router.route([*prompt_tokens, 7]) for prompt_tokens in want]
    assert min(credited) >= CACHED

    with load(want) as found:
        both.lose_master()
        assert found.refused == []
        second.child.kill()
        answers = len(found.served)
        wait_until("the router goes on", lambda: len(found.served) > answers + 20, START)
    assert found.wrong == []
    print(
        f"{len(found.served)} answers, at most {max(found.served):.1f} s each, "
        f"{len(found.refused)} refused while a server was gone"
    )
