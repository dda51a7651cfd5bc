"""The device's eviction policy: what the index passes on to it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvactors.hints import Hints
from kvactors.native import LifeTables, Path
from kvactors.prefix_index.messages import Abandon, Extend, Finish, Preempt
from kvactors.prefix_index.settings import TierPolicies
from tests.prefix_index.objects import BLOCK, Request, acquire, core


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


class Recorder(TierPolicies):
    """Records the ends of requests."""

    def __init__(self) -> None:
        super().__init__("retain", clock=Clock())
        self.tables = LifeTables()
        self.ended: list[tuple[int, int]] = []
        self.hints: list[Hints | None] = []

    def end(self, tree, path, output_tokens: int, hints: Hints | None = None):
        self.ended.append((path.num_committed, output_tokens))
        self.hints.append(hints)
        return super().end(tree, path, output_tokens, hints)


def recorded(blocks: int = 8) -> tuple[Any, Recorder]:
    state, policy = core(blocks, host_tier=False), Recorder()
    state.index.policy = policy
    state.index.tree = policy.tree(BLOCK, 64, hashes=True)
    return state, policy


def begin(state: Any, number: int, blocks: int, *, first: int = 0) -> None:
    message = acquire(number, blocks, first=first)
    state.acquire(message, Request(message))
    assert state.leases.get(number) is not None


def serve(state: Any, number: int, blocks: int, *, first: int) -> int:
    """Returns the hits."""
    begin(state, number, blocks, first=first)
    hits = state.leases.get(number).device_hits
    state.finish(Finish(number, blocks * BLOCK), Request())
    return int(hits)


@pytest.mark.parametrize(
    ("added", "given", "output"), [(0, None, -1), (3, None, 3), (3, 500, 500), (0, 0, 0)]
)
def test_the_output_is_what_was_added_or_what_the_caller_gives(added, given, output):
    state, policy = recorded()
    begin(state, 1, 2)
    if added:
        more = Path(BLOCK, bytes(32))
        more.extend(list(range(added)))
        message = Extend(1, 2 * BLOCK, more)
        state.grow(message, Request(message))
    state.finish(Finish(1, 2 * BLOCK, given), Request())
    assert policy.ended == [(2, output)]


def test_every_end_of_a_lease_reaches_the_policy():
    state, policy = recorded()
    begin(state, 1, 2)
    state.preempt(Preempt(1, 2 * BLOCK), Request())
    begin(state, 1, 2)
    state.abandon(Abandon(1))
    assert policy.ended == [(2, -1), (2, -1)]


def test_hints_reach_the_policy_and_those_of_the_end_replace_the_first():
    state, policy = recorded()
    first, last = Hints(returns_in=3.0), Hints(session_ends=True)
    for number, hints in ((1, None), (2, last)):
        message = msgspec.structs.replace(acquire(number, 2), hints=first)
        state.acquire(message, Request(message))
        state.finish(Finish(number, 2 * BLOCK, hints=hints), Request())
    assert policy.hints == [first, last]


@pytest.mark.parametrize(
    ("hints", "passed"),
    [
        (None, (False, -1.0)),
        (Hints(priority=1), (False, -1.0)),
        (Hints(session_ends=True), (True, -1.0)),
        (Hints(returns_in=2.5), (False, 2.5)),
    ],
)
def test_hints_of_a_return_reach_the_tree(hints, passed):
    calls = Times()
    TierPolicies("retain", clock=lambda: 1.0).end(calls, "path", 3, hints)
    assert calls.calls == [1.0, ("path", 3, *passed)]


class Times:
    """The calls that a tree gets."""

    sharing = False

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def advance(self, now: float) -> None:
        self.calls.append(now)

    def hint(self, path: Any, priority: int, expiry: float) -> None:
        assert path == "path"

    def touch(self, path: Any, output_tokens: int, *hints: Any) -> None:
        self.calls.append((path, output_tokens, *hints))


def test_the_tree_is_given_the_time_before_a_match_and_before_an_end():
    clock, tree, none = Clock(), Times(), Times()
    policy, lru = TierPolicies("retain", clock=clock), TierPolicies("lru", clock=clock)
    clock.at = 5.0
    for one, calls in ((policy, tree), (lru, none)):
        one.advance(calls)
        clock.at = 7.0
        one.end(calls, "path", 3, None)
        clock.at = 5.0
    assert tree.calls == [5.0, 7.0, ("path", 3, False, -1.0)]
    assert none.calls == []


def test_every_match_comes_with_the_time():
    state = core(8, part=1, host_tier=False)
    matched: list[Any] = []
    state.index.policy.advance = matched.append
    message = acquire(1, 3, chunk_tokens=1)
    state.acquire(message, Request(message))
    assert matched == [state.index.tree]


def test_ages_are_those_of_the_given_clock():
    """Ten prompts of two blocks in turns, 5 s apart, and 16 device blocks: LRU hits nothing."""
    clock = Clock()
    state = core(16, host_tier=False)
    state.index.policy = TierPolicies("retain", clock=clock)
    state.index.tree = state.index.policy.tree(BLOCK, 64, hashes=True)
    hits = 0
    for number in range(200):
        clock.at += 5.0
        hits += serve(state, number, 2, first=1000 * (number % 10))
    state.index.tree.check()
    assert hits > 60
    counts = state.index.tree.retention()
    assert counts is not None
    assert (counts["hits"], counts["shadow_hits"]) == (hits, 0)


def test_a_clear_keeps_what_was_learned():
    state, policy = recorded()
    assert serve(state, 1, 2, first=0) == 0
    state.index.retire()
    assert serve(state, 2, 2, first=0) == 0
    assert policy.tables is not None
    assert policy.tables.requests == 2
    assert state.index.tree.retention()["requests"] == 1
