"""Request traces made against eviction policies: each breaks an assumption that one may make.

Each generator yields any number of requests, the same ones every time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from tests.support.traces import Request

Adversary = Callable[[], Iterator[Request]]

Ids = list[int]


class Prompts:
    """New blocks, each id once."""

    def __init__(self) -> None:
        self._next = count()

    def new(self, blocks: int) -> Ids:
        """Blocks that no request had."""
        return list(islice(self._next, blocks))


def floods() -> Iterator[Request]:
    """40 chats that return every 20 s. In one of five minutes one-shot prompts come in between."""
    prompts, now = Prompts(), 0.0
    chats = [prompts.new(20) for _ in range(40)]
    while True:
        for chat in chats:
            now += 0.5
            chat += prompts.new(1)
            yield Request(list(chat), now)
            if len(chat) > 60:
                del chat[20:]
            if int(now) % 300 >= 240:
                for _ in range(3):
                    yield Request(prompts.new(40), now)


def one_shots() -> Iterator[Request]:
    """No prompt comes twice."""
    prompts = Prompts()
    for i in count():
        yield Request(prompts.new(1 + i % 37), i * 0.1)


def chats(
    back: Callable[[int, int, random.Random], float | None], *, every: float = 0.3
) -> Iterator[Request]:
    """Chats of 20 blocks that grow by 2 a turn.

    Args:
        back: of the number of the request, the number of its turn and a random source: the seconds
            until the chat returns, None if it does not.
        every: seconds between new chats.
    """
    prompts, rng, now, made = Prompts(), random.Random(1), 0.0, count()
    waiting: list[tuple[float, int, Ids, int]] = []
    for number in count():
        if waiting and waiting[0][0] <= now:
            at, _, ids, turn = heapq.heappop(waiting)
            ids = ids + prompts.new(2)
        else:
            now += every
            at, ids, turn = now, prompts.new(20), 0
        yield Request(ids, at)
        pause = back(number, turn, rng)
        if pause is not None:
            heapq.heappush(waiting, (at + pause, next(made), ids, turn + 1))


def swapped_roles(half: int) -> Iterator[Request]:
    """At first chats that have returned once return again, and first turns hardly do. After `half`
    requests it is the other way round."""

    def back(number: int, turn: int, rng: random.Random) -> float | None:
        if number % (2 * half) < half:
            stays = turn < 12 if turn else rng.random() < 0.1
            return 100 * rng.uniform(0.8, 1.2) if stays else None
        return None if turn else 20 * rng.uniform(0.8, 1.2)

    return chats(back)


def drifting_pauses(over: int) -> Iterator[Request]:
    """Pauses between turns fall from 200 s to 5 s and jump back."""

    def back(number: int, turn: int, rng: random.Random) -> float | None:
        at = number % over / over
        pause = 200 * 0.025 ** (at / 0.7) if at < 0.7 else 200
        stays = turn < 8 if turn else rng.random() < 0.4
        return pause * rng.uniform(0.8, 1.2) if stays else None

    return chats(back)


def sudden_return(half: int) -> Iterator[Request]:
    """First turns never return, long enough to be sure of it. Then all of them do, soon."""

    def back(number: int, turn: int, rng: random.Random) -> float | None:
        if number % (2 * half) < half:
            return None
        return 15 * rng.uniform(0.8, 1.2) if turn < 3 else None

    return chats(back, every=0.5)


def popular() -> Iterator[Request]:
    """Prompts in a random order by Zipf's law, behind one system prompt."""
    prompts, rng = Prompts(), random.Random(3)
    system = prompts.new(8)
    asked = [system + prompts.new(12) for _ in range(600)]
    weights = [1 / (rank + 1) for rank in range(600)]
    for i in count():
        yield Request(rng.choices(asked, weights)[0], i * 0.4)


def resent() -> Iterator[Request]:
    """A client sends each prompt 40 times at once, and never again. Others chat."""
    prompts, rng, now = Prompts(), random.Random(4), 0.0
    chat_ids = [prompts.new(15) for _ in range(30)]
    for i in count():
        now += 1.0
        yield Request(rng.choice(chat_ids), now)
        if i % 4 == 0:
            ids = prompts.new(30)
            for _ in range(40):
                now += 0.01
                yield Request(ids, now)


def huge(blocks: int = 5000) -> Iterator[Request]:
    """A chat, and from time to time a request of more blocks than many tiers have."""
    prompts, rng = Prompts(), random.Random(5)
    asked = [prompts.new(20) for _ in range(60)]
    for i in count():
        if i % 50 == 49:
            yield Request(prompts.new(blocks if i % 200 == 199 else 250), i * 0.5)
        else:
            yield Request(rng.choice(asked), i * 0.5)


def branches() -> Iterator[Request]:
    """Paths of a tree that branches at every depth, used at random."""
    rng, names = random.Random(6), count()
    ids: dict[tuple[int, ...], int] = {}
    for i in count():
        path: list[int] = []
        at: tuple[int, ...] = ()
        for _ in range(rng.randint(4, 14)):
            at = (*at, min(rng.randrange(4), rng.randrange(4)))
            if at not in ids:
                ids[at] = next(names)
            path.append(ids[at])
        yield Request(path, i * 0.2)


def at_one_instant() -> Iterator[Request]:
    """No time passes."""
    return (one._replace(now=7.0) for one in popular())


def jumping_clock() -> Iterator[Request]:
    """The clock goes backwards and forwards by minutes."""
    for i, one in enumerate(floods()):
        yield one._replace(now=one.now + (300 if i % 700 < 350 else 0) - (200 if i % 90 < 9 else 0))


def clock_set_ahead() -> Iterator[Request]:
    """The clock is set a month ahead once."""
    for i, one in enumerate(floods()):
        yield one._replace(now=one.now + (2_600_000 if i > 1000 else 0))


def pauses(draw: Callable[[random.Random], float], stays: float = 0.8) -> Iterator[Request]:
    """Chats whose pauses come from one distribution, and which continue with this probability."""
    return chats(lambda _, __, rng: draw(rng) if rng.random() < stays else None)


def cycle_of(prompts: int) -> Iterator[Request]:
    """Prompts of 20 blocks asked round and round."""
    source = Prompts()
    asked = [source.new(20) for _ in range(prompts)]
    for i in count():
        yield Request(asked[i % prompts], (i + 1) * 0.3)


def finer(requests: Iterator[Request], by: int) -> Iterator[Request]:
    """The same requests in blocks of a `by`-th of the size."""
    for one in requests:
        ids = [first * by + part for first in one.ids for part in range(by)]
        yield one._replace(ids=ids)


def there_and_back(width: int, prompts: int) -> Iterator[Request]:
    """Prompts forwards and backwards, 0.3 s apart."""
    source = Prompts()
    asked = [source.new(width) for _ in range(prompts)]
    order = [*range(prompts), *range(prompts - 2, 0, -1)]
    for i in count():
        yield Request(asked[order[i % len(order)]], i * 0.3)


def after_a_scan(
    width: int, scanned: int, then: Callable[[], Iterator[Request]]
) -> Iterator[Request]:
    """One-shot prompts, long enough to be sure of them, and then others that do return."""
    for i in range(scanned):
        yield Request(range((1 << 28) + i * width, (1 << 28) + (i + 1) * width), i * 0.3)
    for one in then():
        yield one._replace(now=one.now + scanned * 0.3)


def quiet_then_back(width: int, quiet: int, prompts: int) -> Iterator[Request]:
    """One-shot prompts, and then as many prompts that all return, the last ones first."""
    source, now = Prompts(), 0.0
    while True:
        asked = [source.new(width) for _ in range(quiet + prompts)]
        for ids in [*asked, *reversed(asked[quiet:])]:
            now += 0.3
            yield Request(ids, now)


def in_turns(every: int, *made: Callable[[], Iterator[Request]]) -> Iterator[Request]:
    """Some requests of each adversary in turn, with different blocks."""
    sources, now = [one() for one in made], 0.0
    for turn in count():
        at = turn % len(made)
        for one in islice(sources[at], every):
            now += 0.3
            yield Request([len(made) * block + at for block in one.ids], now, one.output)


def intervals(prompts: int, width: int, every: float) -> Iterator[Request]:
    """A batch job asks the same prompts at fixed times. One-shot prompts come in between."""
    source = Prompts()
    asked = [source.new(width) for _ in range(prompts)]
    for turn in count():
        for i, ids in enumerate(asked):
            yield Request(ids, turn * every + i * 0.05, 50)
        for i in range(20):
            yield Request(source.new(1 + i % 19), turn * every + every * (i + 1) / 21)


HOSTILE: dict[str, Adversary] = {
    "4 x 200 there and back": lambda: there_and_back(4, 200),
    "4 x 900 there and back": lambda: there_and_back(4, 900),
    "20 x 300 there and back": lambda: there_and_back(20, 300),
    "scan, then there and back": lambda: after_a_scan(20, 400, lambda: there_and_back(20, 94)),
    "scan, then a cycle": lambda: after_a_scan(20, 400, lambda: cycle_of(47)),
    "20 x 400 one-shots, 120 return": lambda: quiet_then_back(20, 400, 120),
    "4 x 500 one-shots, 140 return": lambda: quiet_then_back(4, 500, 140),
    "scans and there and back": lambda: in_turns(120, one_shots, lambda: there_and_back(20, 94)),
    "batch jobs": lambda: intervals(25, 20, 120.0),
    "pauses that shrink, fast": lambda: drifting_pauses(700),
    "sudden return, very often": lambda: sudden_return(300),
}
"""Worst cases of short traces, found by a search: no warning comes before the blocks are needed."""

ADVERSARIES: dict[str, Adversary] = {
    "lognormal pauses": lambda: pauses(lambda rng: rng.lognormvariate(3.5, 1.0)),
    "heavy tail of pauses": lambda: pauses(lambda rng: rng.paretovariate(0.7)),
    "blocks of 64": lambda: finer(floods(), 8),
    "blocks of 16": lambda: finer(swapped_roles(300), 32),
    "cycle": lambda: cycle_of(150),
    "floods": floods,
    "one-shots": one_shots,
    "swapped roles": lambda: swapped_roles(10_000),
    "swapped roles, often": lambda: swapped_roles(300),
    "drifting pauses": lambda: drifting_pauses(20_000),
    "drifting pauses, fast": lambda: drifting_pauses(2000),
    "sudden return": lambda: sudden_return(5000),
    "sudden return, often": lambda: sudden_return(700),
    "popular": popular,
    "resent": resent,
    "huge": huge,
    "branches": branches,
    "at one instant": at_one_instant,
    "jumping clock": jumping_clock,
    "clock set ahead": clock_set_ahead,
    **HOSTILE,
}


def first(adversary: Adversary, requests: int) -> Sequence[Request]:
    """The first requests of an adversary."""
    return list(islice(adversary(), requests))
