"""The law of progress in a crowd: pins, quotas, forks, long and short requests, half of which wait
for space."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest

from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Ack
from kvactors.prefix_index.pins import Pins
from kvactors.prefix_index.waiting import WaitQueue
from tests.simulation import SeedReport, run_seed
from tests.simulation.draw import draw_run, with_crowd

SEEDS = range(20, 30)  # reach everything, the rarest more than once
REACHED = (
    "waiting requests watched",
    "overtaken",
    "overtaken by one that fits beside",
    "refused behind others",
    "refused for pins",
)


def crowd(seed: int) -> SeedReport:
    return run_seed(seed, with_crowd(draw_run(seed)))


def test_nothing_is_violated():
    some = [crowd(seed) for seed in SEEDS]
    assert {one.seed: one.violations for one in some if one.violations} == {}
    seen: Counter[str] = sum((Counter(one.seen) for one in some), Counter())
    assert [what for what in REACHED if not seen[what]] == []


withheld = Pins.withheld


def commit_alone(index, message, envelope):
    """A commit that does not look at the requests that wait."""
    lease = index.leases.find(message.lease, envelope)
    if lease is not None and index._commit(lease, message.computed_tokens) is None:
        index.out.reply(envelope, Ack(lease.path.num_committed))


@pytest.mark.parametrize(
    ("what", "method", "broken"),
    [
        ("waits that pins keep out", (Pins, "withheld"), lambda *_: 0),
        ("waits that pins keep out", (WaitQueue, "check_reach"), lambda _: []),
        (
            "may wait for room is refused",
            (Pins, "withheld"),
            lambda s, p, _, d: withheld(s, p, 0, d),
        ),
        (
            "may wait for room is refused",
            (Pins, "withheld"),
            lambda s, p, n, _: withheld(s, p, n, 0),
        ),
        ("overtaken too often", (WaitQueue, "spare"), lambda *_: inf),
        ("is refused", (WaitQueue, "spare"), lambda _, heads: 0 if heads else inf),
        ("waits for room, and fits", (WaitQueue, "look_again"), lambda _: []),
        ("waits for room, and fits", (PrefixIndex, "commit"), commit_alone),
    ],
)
def test_a_breach_is_caught(what, method, broken, monkeypatch):
    monkeypatch.setattr(*method, broken)
    seeds = (27, *range(112))  # 27 is the first one that shows the rarest breach
    assert any(what in text for seed in seeds for text in crowd(seed).violations)
