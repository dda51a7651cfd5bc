"""Random request traces: tenants of several kinds whose habits change from time to time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from tests.support.adversaries import Ids, Prompts
from tests.support.traces import Request

Pause = Callable[[random.Random], float]


class Habit(NamedTuple):
    """How the sessions of one tenant behave in one phase.

    Attributes:
        weight: share of the new sessions.
        begin, grows: blocks of a first turn, and those that each turn adds.
        stays: probabilities that a session continues after its first, second and later turns.
        pause: seconds until it continues.
        outputs: tokens that are produced by turns that are continued, and by the others.
        back: probability that a turn goes back to an earlier part of its path.
    """

    weight: float
    begin: tuple[int, int]
    grows: tuple[int, int]
    stays: tuple[float, float, float]
    pause: Pause
    outputs: tuple[int, int]
    back: float


def draw_pause(rng: random.Random) -> Pause:
    """A distribution of pauses."""
    kind, scale = rng.randrange(6), 10 ** rng.uniform(-0.5, 2.7)
    if kind == 0:
        return lambda rng: scale * rng.expovariate(1)
    if kind == 1:
        return lambda rng: scale * rng.uniform(0.8, 1.2)
    if kind == 2:
        wide = rng.uniform(0.3, 2.0)
        return lambda rng: scale * rng.lognormvariate(0, wide)
    if kind == 3:
        return lambda rng: min(scale * rng.paretovariate(0.8), 1e6)
    if kind == 4:
        share, far = rng.random(), 10 ** rng.uniform(0.5, 2)
        return lambda rng: scale * (far if rng.random() < share else 1)
    return lambda _: scale


def draw_habit(rng: random.Random) -> Habit:
    """The habit of a tenant."""
    begin, grows = rng.choice((1, 5, 20, 80)), rng.choice((0, 1, 4, 16))
    share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    later = rng.choice((0.0, 0.5, 0.8, 0.95))
    return Habit(
        rng.random() ** 2,
        (begin, begin * rng.randint(1, 4)),
        (grows, grows * rng.randint(1, 3)),
        (share, rng.choice((share, 1 - share, later)), later),
        draw_pause(rng),
        rng.choice(((100, 100), (20, 2000), (2000, 20))),
        rng.choice((0.0, 0.0, 0.3)),
    )


class Session(NamedTuple):
    """An open session."""

    ids: Ids
    turn: int
    tenant: int


def mixed(seed: int) -> Iterator[Request]:
    """Up to four tenants, each with a system prompt, and with new habits in each phase."""
    rng, prompts, made, now = random.Random(seed), Prompts(), count(), 0.0
    tenants = rng.randint(1, 4)
    systems = [prompts.new(rng.choice((0, 0, 3, 30))) for _ in range(tenants)]
    every = 10 ** rng.uniform(-1.5, 1)
    phase = rng.choice((150, 500, 1500, 5000, 1 << 30))
    returns = rng.random() < 0.5  # to the habits of the phase before the last
    known: list[list[Habit]] = []
    waiting: list[tuple[float, int, Session]] = []
    for number in count():
        if number % phase == 0:
            if not returns or len(known) < 2:
                known.append([draw_habit(rng) for _ in range(tenants)])
            habits = known[number // phase % 2 if returns else -1]
        if waiting and waiting[0][0] <= now:
            at, _, (ids, turn, tenant) = heapq.heappop(waiting)
            habit = habits[tenant]
            if rng.random() < habit.back and len(ids) > 2:
                ids = ids[: rng.randrange(1, len(ids))]
            ids = ids + prompts.new(rng.randint(*habit.grows))
        else:
            now += every * rng.expovariate(1)
            tenant = rng.choices(range(tenants), [one.weight for one in habits])[0]
            habit, at, turn = habits[tenant], now, 0
            ids = systems[tenant] + prompts.new(rng.randint(*habit.begin))
        stays = rng.random() < habit.stays[min(turn, 2)]
        yield Request(ids, at, habit.outputs[not stays])
        if stays and len(ids) < 280:
            session = Session(ids, turn + 1, tenant)
            heapq.heappush(waiting, (at + habit.pause(rng), next(made), session))
