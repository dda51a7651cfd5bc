"""The law of progress in a crowd: pins, quotas, forks, long and short requests, half of which wait
for space."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest

from kvactors.prefix_index.admission import Admission
from kvactors.prefix_index.core import IndexCore
from kvactors.prefix_index.pins import Pins
from tests.simulation import SeedReport, run_seed
from tests.simulation.draw import draw_run
from tests.simulation.sharing import with_crowd

SEEDS = 24
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
    some = [crowd(seed) for seed in range(SEEDS)]
    assert {one.seed: one.violations for one in some if one.violations} == {}
    seen: Counter[str] = sum((Counter(one.seen) for one in some), Counter())
    assert [what for what in REACHED if not seen[what]] == []


withheld = Pins.withheld


@pytest.mark.parametrize(
    ("what", "method", "broken"),
    [
        ("waits that pins keep out", (Pins, "withheld"), lambda *_: 0),
        ("waits that pins keep out", (Admission, "refuse_unreachable"), lambda _: []),
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
        ("overtaken too often", (Admission, "spare"), lambda *_: inf),
        ("is refused", (Admission, "spare"), lambda _, heads: 0 if heads else inf),
        ("waits for room, and fits", (Admission, "look_again"), lambda _: []),
        (
            "waits for room, and fits",
            (IndexCore, "commit"),
            lambda s, m, e: s.commits.commit(m.lease, m.computed_tokens, e),
        ),
    ],
)
def test_a_breach_is_caught(what, method, broken, monkeypatch):
    monkeypatch.setattr(*method, broken)
    assert any(what in text for seed in range(4 * SEEDS) for text in crowd(seed).violations)
