"""Hints of callers are features that RETAIN learns from: true ones help, and false ones cost nothing
that the guard does not permit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvactors.native import LifeTables
from kvactors.scenario.sweep import DeviceTier

PROMPT = 20


def chats(requests, *, honest=True, feature="", pause=30.0, size=600):
    """Half of all prompts return once, after a pause. Returns the hits, and those of LRU.

    feature: what tells a prompt that returns from others: "hints", "outputs" of another length, or
    nothing. honest: whether hints are true.
    """
    rng, device = random.Random(3), DeviceTier(size, LifeTables())
    waiting, made, hits, now = [], 0, 0, 0.0
    for _ in range(requests):
        now += 0.5
        if waiting and waiting[0][0] <= now:
            ids, stays = waiting.pop(0)[1], False
        else:
            ids, stays = np.arange(made, made + PROMPT, dtype=np.uint32), rng.random() < 0.5
            made += PROMPT
        hints = {"ends": True} if stays != honest else {"returns_in": 30.0}
        hints = hints if feature == "hints" else {}
        output = (2000 if stays else 10) if feature == "outputs" else -1
        hits += device.request(ids, now, output, **hints)
        if stays:
            waiting.append((now + pause, ids))
    device.tree.check()
    return hits, device.tree.retention()["shadow_hits"]


def test_times_and_the_lengths_of_outputs_are_learned_from():
    """No prompt returns while LRU keeps it."""
    plain, lru = chats(3000, pause=60.0)
    assert lru == 0
    assert plain > 4000
    assert chats(3000, feature="outputs", pause=60.0)[0] > 8000


def test_true_hints_help():
    without, lru = chats(3000)
    hits, _ = chats(3000, feature="hints")
    assert hits > 1.2 * without
    assert hits > 1.2 * lru


def test_false_hints_are_learned_away():
    """A session with the hint that it ends returns, and the other way round: the opposite is learned."""
    true, _ = chats(3000, feature="hints")
    false, lru = chats(3000, honest=False, feature="hints")
    assert false > 0.9 * true
    assert false > lru


@pytest.mark.parametrize("size", [100, 600, 1500])
def test_hints_at_random_cost_nothing(size):
    rng, now = random.Random(7), 0.0
    device, blocks, hits = DeviceTier(size, LifeTables()), 0, 0
    for number in range(4000):
        now += 0.5
        first = rng.randrange(80 if number % 500 < 250 else 20) * PROMPT
        hints = rng.choice([{"ends": True}, {"returns_in": rng.uniform(0, 1000)}, {}])
        blocks += PROMPT
        hits += device.request(np.arange(first, first + PROMPT, dtype=np.uint32), now, **hints)
    assert hits >= device.tree.retention()["shadow_hits"] - 0.002 * blocks
