"""FastDeploy's end-to-end cases with the model of its scheduler: 4 device blocks of 64 tokens, host
memory, requests of at most 128 tokens, and a draft model (MTP). Every cached byte that a request
starts from is compared with the model's, draft layers included."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.integrations.fastdeploy.config import Request
from tests.integrations.fastdeploy.invariants import check
from tests.integrations.fastdeploy.oracle import ModelMemory

BLOCK, LONGEST = 64, 128
HOST = 128
"""Host blocks. 10 GB have space for every prompt of the cases."""


class Server:
    """An engine and its scheduler, to which clients send prompts."""

    def __init__(self, engine: Any, cpu: int = HOST, **settings: Any) -> None:
        self.memory = ModelMemory(4, BLOCK, layers=3)
        self.one = engine(
            4,
            cpu,
            memory=self.memory,
            block_size=BLOCK,
            max_model_len=LONGEST,
            drafts=1,
            **settings,
        )
        draws = random.Random(5)
        self.scheduler = self.one.scheduler(
            drafts=2, accepted=lambda _: draws.randrange(3), max_running=2
        )
        self.names = 0

    def add(self, prompt: Any, max_tokens: int, media: Any = None) -> Request:
        self.names += 1
        request = Request(f"r{self.names}", prompt, media)
        self.scheduler.add(request, max_tokens)
        return request

    def ask(self, prompt: Any, max_tokens: int = 6, media: Any = None) -> Request:
        """A request, served to its end."""
        request = self.add(prompt, max_tokens, media)
        self.scheduler.run()
        return request

    def cached(self, request: Request) -> int:
        """The cached tokens that a request has started from."""
        return [tokens for name, tokens, _ in self.scheduler.hits if name == request.request_id][-1]

    def check(self) -> None:
        """Every byte was right, every request has ended, and nothing is held."""
        assert self.scheduler.wrong == []
        assert self.scheduler.failures == []
        assert len(self.scheduler.finished) == self.names
        assert self.one.available == 4
        check(self.one.manager)


@pytest.fixture
def server(engine):
    made = Server(engine)
    yield made
    made.check()


def prompts(count: int, seed: int = 1, tokens: int = 100) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, tokens).tolist() for _ in range(count)]


def test_a_cold_request_has_no_cached_tokens_and_its_repetition_and_second_turn_have(server):
    (prompt,) = prompts(1, tokens=70)
    first, second = server.ask(prompt), server.ask(prompt)
    assert server.cached(first) == 0
    assert server.cached(second) == BLOCK
    assert second.output_token_ids == first.output_token_ids
    turn = server.ask([*first.tokens, *prompts(1, seed=2, tokens=30)[0]])
    assert server.cached(turn) == BLOCK


@pytest.mark.parametrize(("count", "hot", "times"), [(20, 20, 1), (32, 10, 3)])
def test_prompts_that_left_the_device_are_found_in_host_memory(server, count, hot, times):
    some = prompts(count, seed=3)
    for prompt in some:
        assert server.cached(server.ask(prompt)) == 0
    before = server.one.manager.statistics().cpu_tokens
    for _ in range(times):
        for prompt in some[:hot]:
            assert server.cached(server.ask(prompt)) == BLOCK
    loaded = server.one.manager.statistics().cpu_tokens - before
    assert loaded >= (times * hot - 4) * BLOCK, "with 4 device blocks"


@pytest.mark.parametrize("place", [(0, 64), (10, 20), (40, 50)])
def test_pictures_are_found_in_host_memory_and_not_mistaken(server, place):
    """Prompts with the same tokens and other pictures, more than the device holds."""
    (prompt,) = prompts(1, seed=8)
    offset, length = place
    pictures = [f"picture {number}" for number in range(9)]
    for expected in (0, BLOCK, BLOCK):
        for picture in pictures:
            request = server.ask(prompt, media=[(offset, length, picture)])
            assert server.cached(request) == expected
    assert server.one.manager.statistics().cpu_tokens >= 2 * 5 * BLOCK
    assert server.cached(server.ask(prompt)) == 0, "without a picture"


@pytest.mark.parametrize(
    "prompt",
    [
        list(range(LONGEST - 1)),
        [0] * 100,
        [(1 << 32) - 1] * 100,
        [7],
        np.arange(100, dtype=np.uint32),
        list("Grüße, 你好, \u0000\u202e\U0001f600 '; DROP--".encode() * 3),
    ],
    ids=["longest", "zeros", "largest tokens", "one token", "array", "special text"],
)
def test_long_and_special_prompts_are_served(server, prompt):
    for _ in range(2):
        request = server.ask(prompt, max_tokens=1)
    assert len(request.output_token_ids) == 1
    assert server.cached(request) == len(prompt) // BLOCK * BLOCK
