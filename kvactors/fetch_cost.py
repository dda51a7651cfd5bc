"""Load or recompute: whether a fetch of stored blocks takes less time than computing their tokens.

Pure arithmetic over measured times. The index knows the engine's speed (`PrefillRate`), the host
tier that of the store (`FetchCost`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from kvactors.storage.messages import Outcome

KEPT = 0.9
"""Weight of the earlier measurements of a store after each further one."""

HALF_LIFE_S = 5.0
"""Seconds after which the measurements of a store weigh half as much against new ones."""

TRIAL = 16
"""Of so many fetches that seem too slow one is begun, which measures the store again."""

PREFILL_KEPT = 0.99
"""Weight of the earlier measured commits after each further one."""

PREFILL_MEASURED_S = 1.0
"""Seconds of weighted commits before a measured rate is used. An engine whose commits take less
than 10 ms on average computes nothing: a test, or a receiver of another node's KV."""


class TimeLine:
    """Seconds as a linear function of a number of blocks, fitted to measurements by weighted least
    squares. Neither the constant nor the slope is negative."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, x, y, x * x, x * y
        self._at = 0.0

    def add(self, blocks: int, seconds: float, now: float) -> None:
        """Add a measurement."""
        kept = KEPT * 0.5 ** ((now - self._at) / HALF_LIFE_S)
        new = (1.0, blocks, seconds, blocks * blocks, blocks * seconds)
        n, x, y, xx, xy = (kept * old + one for old, one in zip(self._sums, new, strict=True))
        self._sums, self._at = (n, x, y, xx, xy), now

    def at(self, blocks: int) -> float:
        """Predicted seconds. The less where measurements of one number of blocks leave a choice;
        0.0 without any."""
        n, x, y, xx, xy = self._sums
        if not n:
            return 0.0
        spread = n * xx - x * x
        if spread <= 1e-6 * n * xx:
            return y / n * min(1.0, blocks * n / x) if x else y / n
        slope = max(0.0, (n * xy - x * y) / spread)
        constant = (y - slope * x) / n
        return constant + slope * blocks if constant >= 0 else blocks * xy / xx


class FetchCost:
    """Times of a store, from the answers to its reads and look-ups.

    A read is answered after a time that grows with its blocks and with those of unanswered reads
    before it: so queues, concurrency and bandwidth are measured as one. Without a measurement a
    fetch takes no time, and is begun.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.reads, self._asks = TimeLine(), TimeLine()
        self._numbers = count()
        self._begun: dict[int, float] = {}  # start of each read in flight, the oldest first
        self._queued = 0  # their blocks
        self._slow = 0  # fetches that seemed too slow

    def read(self, blocks: int, then: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """A read begins. Returns what takes its outcomes: `then`, measured."""
        number, start, ahead = next(self._numbers), self._clock(), self._queued
        self._begun[number] = start
        self._queued += blocks

        def answered(outcomes: bytes) -> None:
            del self._begun[number]
            self._queued -= blocks
            now = self._clock()
            if came := outcomes.count(Outcome.OK):
                self.reads.add(ahead + came, now - start, now)
            then(outcomes)

        return answered

    def ask(self, then: Callable[[int], None]) -> Callable[[int], None]:
        """A look-up begins. Returns what takes its answer: `then`, measured."""
        start = self._clock()

        def answered(found: int) -> None:
            now = self._clock()
            self._asks.add(0, now - start, now)
            then(found)

        return answered

    def refusal(self, blocks: int, compute_s: float, ahead: int = 0, *, asked: bool) -> str:
        """Why computing blocks is better than a fetch of them: it is `slow`, or reads before it
        make it so (`backlog`). Empty if the fetch is better.

        Args:
            blocks: that the store has.
            compute_s: seconds that computing them takes, 0.0 if not known.
            ahead: blocks whose reads are due before and have not begun.
            asked: whether the store has answered which blocks it has.
        """
        if not compute_s:
            return ""
        left = compute_s - (0.0 if asked else self._asks.at(0))
        if self.reads.at(blocks) > left:
            return "slow"
        oldest = next(iter(self._begun.values()), self._clock())
        queued = self.reads.at(self._queued + ahead + blocks)
        return "backlog" if max(queued, self._clock() - oldest) > left else ""

    def is_trial(self) -> bool:
        """Whether the next fetch that seems too slow is begun all the same."""
        self._slow += 1
        return self._slow % TRIAL == 0


class PrefillRate:
    """Tokens that the engine computes in a second, as set or from the commits of prompts.

    A commit took the time since the last one, or since its request was ready if that is later. So
    requests that are computed together count together, and idle times do not count.

    Args:
        given: tokens a second. 0.0: not known, and not measured. None: measured.
    """

    def __init__(self, given: float | None) -> None:
        self.measures = given is None
        self._tokens, self._seconds = given or 0.0, float(bool(given))
        self._last = 0.0

    def computed(self, tokens: int, ready_at: float, now: float) -> None:
        """A commit of tokens of a prompt, whose request has been ready since `ready_at`."""
        self._tokens = PREFILL_KEPT * self._tokens + tokens
        self._seconds = PREFILL_KEPT * self._seconds + now - max(ready_at, self._last)
        self._last = now

    @property
    def tokens_per_s(self) -> float:
        """0.0 if not known."""
        known = self._seconds >= PREFILL_MEASURED_S
        return self._tokens / self._seconds if known else 0.0

    def seconds(self, tokens: int) -> float:
        """Seconds that computing tokens takes, 0.0 if not known."""
        rate = self.tokens_per_s
        return tokens / rate if rate else 0.0
