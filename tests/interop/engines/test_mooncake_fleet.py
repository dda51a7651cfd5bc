"""Two vLLM servers with kvactors over one Mooncake pool behind vLLM's router: a prompt that one
computed is a hit on the other, with the same tokens, before and after every fault of the fleet."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvactors.scenario.mooncake_master import Master
from tests.fleet.run import Network, run
from tests.interop.conftest import INSIDE_NETWORK
from tests.interop.consumers.base import wait_until
from tests.interop.engines.fleet import ROUTER, START, FleetRouter, Server, complete
from tests.interop.engines.test_fleet import HITS, LENGTH, SERVED, prompt
from tests.interop.engines.tiny_llama import write_model
from tests.interop.environments import Environments

pytestmark = pytest.mark.engines

PROMPTS = 4
CACHED = 256
"""Tokens of a prompt that must come from the pool at least."""
CHUNKS = LENGTH // 32 - 1
"""Objects that the pool has of a prompt at least."""
HEALTHY = "vllm:kv_offload_healthy"
CLIENTS = 2
"""Of the router, each with one request at a time."""
OUTER, INNER = "10.79.0.1", "10.79.0.2"
"""Ends of the link of requests to the second server. The pool has another link, which is cut."""


def storage(address: str, host: str) -> dict[str, object]:
    """Settings of a server's storage.

    Args:
        address: of the pool's master.
        host: the address of the server in the pool's network.
    """
    mooncake = {
        "master_server_address": address,
        "local_hostname": host,
        "global_segment_size": "128MB",
        "local_buffer_size": "16MB",
        "timeout_s": 1.0,
        "connect_timeout_s": 300.0,
    }
    return {"backend": "mooncake", "timeout_s": 20.0, "mooncake": mooncake}


def objects(one: Master, host: str) -> float:
    """Objects of the pool."""
    with urllib.request.urlopen(f"http://{host}:{one.metrics_port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("master_key_count "):
                return float(line.split()[1])
    raise AssertionError("the master has no master_key_count")


@contextmanager
def namespace(network: Network) -> Iterator[list[str]]:
    """A network namespace with a link to the pool's network and one for requests. Gives the start
    of a command that runs the rest of it there."""
    holder = subprocess.Popen([*network.prefix, "sleep", "infinity"])
    inside = Path(f"/proc/{holder.pid}/ns/net")
    enter = ["nsenter", f"--net={inside}"]
    try:
        here = Path("/proc/self/ns/net").readlink()
        wait_until("the namespace is there", lambda: inside.readlink() != here)
        commands = network.attach(0, holder.pid)
        run("ip", "link", "add", "name", "outer", "type", "veth", "peer", "name", "inner")
        run("ip", "link", "set", "inner", "netns", str(holder.pid))
        run("ip", "addr", "add", f"{OUTER}/30", "dev", "outer")
        run("ip", "link", "set", "outer", "up")
        commands += [
            ["ip", "addr", "add", f"{INNER}/30", "dev", "inner"],
            ["ip", "link", "set", "inner", "up"],
        ]
        for command in commands:
            subprocess.run([*enter, *command], check=True)
        yield enter
    finally:
        holder.kill()
        holder.wait()


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
                answer = complete(ROUTER, tokens)
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
    """Two servers over a pool, of which the second one is in another namespace.

    Attributes:
        network: of the pool.
        master: of the pool.
        first, second: the servers.
    """

    def __init__(self, network: Network, master: Master, servers: list[Server]) -> None:
        self.network, self.master = network, master
        self.first, self.second = servers
        self._draw = random.Random(11)

    def fresh(self) -> list[int]:
        """A prompt that no server has seen."""
        return prompt(self._draw, LENGTH)

    def shares(self) -> bool:
        """Whether a new prompt of the first server is a hit on the second, with the same tokens."""
        tokens = self.fresh()
        expected = complete(self.first.url, tokens)
        hits = self.second.metric(HITS)
        assert complete(self.second.url, tokens) == expected
        return self.second.metric(HITS) - hits >= CACHED

    def degraded(self, server: Server) -> bool:
        """Whether a server that serves shows that its pool does not work."""
        complete(server.url, self.fresh())
        return server.metric(HEALTHY) == 0

    def recovered(self) -> bool:
        """Whether the pool is used again."""
        return self.shares() and all(
            server.metric(HEALTHY) == 1 for server in (self.first, self.second)
        )

    def hurt(self, what: str, server: Server, begin: Callable[[], object]) -> None:
        """Begin a fault, and wait until a server shows it."""
        begun = time.monotonic()
        begin()
        wait_until(f"{what}: degraded", lambda: self.degraded(server), START)
        print(f"{what}: degraded after {time.monotonic() - begun:.1f} s")

    def heal(self, what: str, end: Callable[[], object]) -> None:
        """End a fault, and wait until both servers use the pool."""
        begun = time.monotonic()
        end()
        wait_until(f"{what}: the pool serves again", self.recovered, START)
        print(f"{what}: recovered after {time.monotonic() - begun:.1f} s")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the master."""
        assert self.master.process is not None
        self.master.process.send_signal(number)

    def hurt_pool(self) -> None:
        """Every fault of the master, and of the second server's link to the pool."""
        master, network = self.master, self.network
        self.hurt("paused master", self.first, lambda: self.signal(signal.SIGSTOP))
        self.heal("paused master", lambda: self.signal(signal.SIGCONT))
        self.hurt("killed master", self.first, master.kill)
        self.heal("killed master", master.start)
        self.hurt("cut link", self.second, lambda: network.cut(0))
        self.heal("cut link", lambda: network.restore(0))


@pytest.fixture
def pair(environments: Environments, tmp_path: Path) -> Iterator[tuple[Pair, FleetRouter] | None]:
    """Two servers that answer, and their router."""
    if not INSIDE_NETWORK:
        yield None
        return
    model = write_model(tmp_path / "model")
    network = Network(isolated=True)
    master = Master(host=network.hub)
    with ExitStack() as ends:
        ends.callback(master.kill)
        master.start()
        enter = ends.enter_context(namespace(network))
        servers = [
            Server(
                environments,
                model,
                tmp_path,
                port,
                storage(master.address, pool_host),
                "vllm_pool",
                host,
                prefix,
            )
            for port, pool_host, host, prefix in (
                (18210, network.hub, "127.0.0.1", []),
                (18220, network.address(0), INNER, enter),
            )
        ]
        for server in servers:
            ends.callback(server.close)
        for server in servers:
            server.wait()
        router = FleetRouter(environments, tmp_path, servers)
        ends.callback(router.child.close)
        router.wait()
        yield Pair(network, master, servers), router


def test_a_prompt_of_one_server_is_a_hit_on_the_other(pair: tuple[Pair, FleetRouter]) -> None:
    """Faults cost hits. Every answer has the tokens that a server without a cache samples, and
    none is refused while its server runs."""
    both, router = pair
    first, second = both.first, both.second
    fresh = [tuple(both.fresh()) for _ in range(PROMPTS)]
    want = {tokens: complete(first.url, tokens) for tokens in fresh}
    assert first.metric(HITS) == 0, "the tokens are those of a server without a cache"
    hub = both.network.hub
    wait_until(
        "the pool has the prompts", lambda: objects(both.master, hub) >= PROMPTS * CHUNKS, START
    )
    cached = []
    for prompt_tokens, expected in want.items():
        hits = second.metric(HITS)
        assert complete(second.url, prompt_tokens) == expected
        cached.append(second.metric(HITS) - hits)
    print(f"tokens that the second server had from the pool: {cached}")
    assert min(cached) >= CACHED
    before = sum(server.metric(SERVED) for server in (first, second))
    for prompt_tokens in want:
        router.route([*prompt_tokens, 7])
    assert sum(server.metric(SERVED) for server in (first, second)) == before + PROMPTS

    with load(want) as found:
        both.hurt_pool()
        assert found.refused == []
        second.kill()
        answers = len(found.served)
        wait_until("the router goes on", lambda: len(found.served) > answers + 20, START)
        second.start()
        second.wait()
        both.heal("killed server", lambda: None)
        served = second.metric(SERVED)
        wait_until("the router uses it", lambda: second.metric(SERVED) > served + 2, START)
    assert found.wrong == []
    print(
        f"{len(found.served)} answers, at most {max(found.served):.1f} s each, "
        f"{len(found.refused)} refused while a server was gone"
    )
