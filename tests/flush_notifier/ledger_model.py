"""A naive model of the ledger: the truth, the tasks sent to each sink, and the entries that may be
forgotten or must be kept.

`Model` carries out one action at a time on a ledger and on itself, and compares. `walk` chooses
them at random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvactors.actor.sliced import finish
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.view import DeliveryBatch, SinkFilter
from kvactors.types import ALL_TIERS, Reason, Residency, Tier, join_hashes, split_hashes
from tests.flush_notifier.helpers import (
    AT_FINISH,
    BLOCK,
    BOTH,
    EVERYTHING,
    NODE,
    PER_TIER,
    ROOT,
    SALTED,
    announced,
    finished,
    known,
    names,
    path,
    take,
)

WIDTH, DEPTH = 3, 5
NODE_AT_FINISH = SinkFilter(BOTH, node=True, at_finish=True)
HOST_ALONE = SinkFilter(int(Tier.HOST), node=False, at_finish=False)
BY_TOKENS = SinkFilter(BOTH, node=True, at_finish=False, by_tokens=True)
VIEWS = (PER_TIER, NODE, AT_FINISH, EVERYTHING, NODE_AT_FINISH, HOST_ALONE, BY_TOKENS)
EPOCH = 7


class Settings(NamedTuple):
    """Limits of one ledger. takes_clear, by_name: sinks, by number."""

    views: tuple[SinkFilter, ...] = VIEWS[:3]
    idle_limit: int = 1
    takes_clear: tuple[int, ...] = (0,)
    by_name: tuple[int, ...] = ()


def rooted(branch: tuple[int, ...]) -> tuple[int, ...]:
    """The same branch, and on another root if it takes the last turn first."""
    return (SALTED, *branch[1:]) if branch[0] == WIDTH - 1 else branch


def drawn(rng: random.Random) -> Settings:
    """Settings at random, every limit small."""
    views = tuple(rng.choice(VIEWS) for _ in range(rng.randint(1, 4)))
    sinks = range(len(views))
    some = [tuple(i for i in sinks if rng.random() < 0.5) for _ in range(2)]
    return Settings(views, rng.choice((1, 1, 2, 3, 5, 8, 13, 30, 64)), *some)


class Fact(NamedTuple):
    """A fact of which the ledger has taken a part. end: makes it true in the model. keys: the
    blocks that it is about."""

    steps: Iterator[None]
    end: Callable[[], None]
    keys: frozenset[bytes]


class Model:
    """truth: tiers by block. known: blocks whose path the ledger remembers. mirrors: by sink, tiers
    by block, according to the tasks that arrived. flying: by sink, the batch in flight. ending: by
    sink,
    the steps that a delivered batch still takes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        filters = [
            view._replace(takes_clear=i in settings.takes_clear, by_name=i in settings.by_name)
            for i, view in enumerate(settings.views)
        ]
        self.book = Ledger(BLOCK, filters, settings.idle_limit, token_root=ROOT)
        self.sinks = range(len(settings.views))
        self.truth: dict[bytes, int] = {}
        self.tokens: dict[bytes, bytes] = {}  # of every path that was ever announced
        self.parents: dict[
            bytes, bytes | None
        ] = {}  # the same, None above the first block of a path
        self.plain: set[bytes] = set()  # of the scope that sinks addressed by tokens take
        self.known: set[bytes] = set()
        self.finished: set[bytes] = set()
        self.mirrors: list[dict[bytes, int]] = [{} for _ in self.sinks]
        self.flying: list[DeliveryBatch | None] = [None for _ in self.sinks]
        self.ending: dict[int, Iterator[None]] = {}
        self.fact: Fact | None = None
        self.before: dict[bytes, int] = {}  # the truth before the fact that ends now
        self.suspects: dict[
            bytes, int
        ] = {}  # forgotten while a fact was about them, and what was true before that fact
        self.forgotten = 0

    # -- facts

    def announce(self, branch: tuple[int, ...], start: int, count: int, tier: Tier) -> None:
        self._learn(branch)
        held = names(*branch)[start : start + count]
        self._begin(
            self.book.announce(announced(*branch, start=start, count=count, tier=tier)),
            held,
            lambda: self._hold(held, tier),
        )

    def finish(self, branch: tuple[int, ...]) -> None:
        self._learn(branch)
        held = names(*branch)

        def end() -> None:
            self._hold(held, Tier.DEVICE)
            self.finished.update(held)

        self._begin(self.book.announce(finished(*branch)), held, end)

    def gain(self, branch: tuple[int, ...], tier: Tier) -> None:
        keys = names(*branch)
        self._begin(
            self.book.gain(join_hashes(keys), tier, Reason.OFFLOAD),
            keys,
            lambda: self._hold(keys, tier),
        )

    def lose(self, branch: tuple[int, ...], last: int, tier: Tier) -> None:
        keys = names(*branch)[-last:]

        def end() -> None:
            self.truth.update({key: self.truth.get(key, 0) & ~tier for key in keys})

        self._begin(self.book.lose(join_hashes(keys[::-1]), tier, Reason.CPU_EVICTION), keys, end)

    def clear(self, tier: Tier) -> None:
        def end() -> None:
            self.truth = {key: mask & ~tier for key, mask in self.truth.items()}

        self.complete()
        self._begin(self.book.clear(tier, Reason.CLEAR), list(self.truth), end)

    def clear_everything(self) -> None:
        for tier in Tier:
            self.clear(tier)
            self.complete()

    def _learn(self, branch: tuple[int, ...]) -> None:
        keys = names(*branch)
        self.tokens.update({key: path(*branch[: i + 1])[0] for i, key in enumerate(keys)})
        self.parents.update(zip(keys, [None, *keys], strict=False))
        self.plain.update(keys if branch[0] != SALTED else ())

    def _hold(self, keys: list[bytes], tier: Tier) -> None:
        self.truth.update({key: self.truth.get(key, 0) | tier for key in keys})

    def _begin(self, steps: Iterator[None], keys: list[bytes], end: Callable[[], None]) -> None:
        self.complete()
        self.fact = Fact(steps, end, frozenset(keys))
        self.go_on()

    def go_on(self) -> None:
        """One step of the fact in progress, and one of every delivery that is ending. No other fact
        comes before its last step."""
        if self.fact is not None and next(self.fact.steps, self) is self:
            fact, self.fact = self.fact, None
            self.before = {key: self.truth.get(key, 0) for key in fact.keys}
            fact.end()
            self._notice_forgotten()
            self.before = {}
            resident = [
                key for key, before in self.suspects.items() if before & self.truth.get(key, 0)
            ]
            assert not resident, "a resident block was forgotten"
            self.suspects.clear()
        self._notice_forgotten()
        for sink, steps in list(self.ending.items()):
            if next(steps, self) is self:
                del self.ending[sink]
            self._notice_forgotten()

    def complete(self) -> None:
        while self.fact is not None or self.ending:
            self.go_on()

    def _notice_forgotten(self) -> None:
        """Only blocks that are nowhere, and that no sink and no delivery is about, may be
        forgotten, and only when too many are kept."""
        now = known(self.book)
        vanished = self.known - now
        moving = self.fact.keys if self.fact is not None else frozenset()
        for key in vanished:
            if key in moving:  # known at the end of the fact
                self.suspects[key] = self.truth.get(key, 0)
            else:
                held = self.truth.get(key, 0) & self.before.get(key, ALL_TIERS)
                assert not held, "a resident block was forgotten"
            assert not any(mirror.get(key, 0) for mirror in self.mirrors), (
                "a block was forgotten that a sink holds"
            )
        if vanished:
            assert len(self.book.tree.idle) >= self.settings.idle_limit, (
                "a block was forgotten although there was room"
            )
            for batch in filter(None, self.flying):
                assert vanished.isdisjoint(
                    key for task in batch.tasks for key in split_hashes(task.hashes)
                ), "forgotten in delivery"
        self.forgotten += len(vanished)
        self.finished -= vanished
        self.known = now

    # -- deliveries

    def repeat(self, sink: int) -> None:
        """All of a sink's view is sent again."""
        self.book.sinks[sink].repeat()

    def lose_index(self, sink: int) -> None:
        """A sink's index is emptied while no delivery to it is in flight."""
        self.complete()
        if self.flying[sink] is None:
            self.mirrors[sink].clear()
            self._begin(self.book.sinks[sink].reset(), [], lambda: None)

    def take(self, sink: int, limit: int) -> None:
        self.complete()
        if self.flying[sink] is None:
            batch = self.flying[sink] = take(self.book, sink, limit, EPOCH)
            assert bool(batch.tasks) == bool(self.book.sinks[sink].pending)

    def end(self, sink: int, *, answered: bool, arrived: int) -> None:
        """A call is over. answered: the sink acknowledged it. arrived: how many tasks it took,
        whether or not it acknowledged them."""
        batch = self.flying[sink]
        if batch is None or sink in self.ending:
            return
        self._arrive(sink, batch if answered else batch.split(arrived)[0])
        self.flying[sink] = None
        self.ending[sink] = (
            self.book.sinks[sink].delivered(batch)
            if answered
            else self.book.sinks[sink].refused(batch)
        )
        self.go_on()

    def end_in_the_middle(self, sink: int, taken: int) -> None:
        batch = self.flying[sink]
        if batch is None or batch.cleared or sink in self.ending:
            return
        done, rest = batch.split(taken)
        self._arrive(sink, done)
        self.flying[sink] = None
        self.ending[sink] = itertools.chain(
            self.book.sinks[sink].delivered(done), self.book.sinks[sink].refused(rest)
        )
        self.go_on()

    def _arrive(self, sink: int, batch: DeliveryBatch) -> None:
        """The tasks, block by block as a reader of events takes them: after each of them its view
        is a tree."""
        mirror, by_name = self.mirrors[sink], sink in self.settings.by_name
        for task in batch.tasks:
            keys, bit, resident = (
                split_hashes(task.hashes),
                int(task.tier),
                task.residency is Residency.RESIDENT,
            )
            if not task.count:
                assert sink in self.settings.takes_clear
                assert len(batch.tasks) == 1
                mirror.clear()
                continue
            assert task.epoch == EPOCH
            assert len(keys) == task.count >= 1
            self._compare_tokens(task, keys, own=by_name)
            for key in keys if resident else reversed(keys):
                if resident:
                    self._gains(mirror, key, bit)
                else:
                    self._loses(mirror, key, bit)

    def _gains(self, mirror: dict[bytes, int], key: bytes, bit: int) -> None:
        above = self.parents[key]
        if above is not None:
            assert mirror.get(above, 0), "a block is announced, and the block above it is nowhere"
            assert bit != Tier.DEVICE or mirror[above] & bit, (
                "announced on the device, and the block above it is not there"
            )
        mirror[key] = mirror.get(key, 0) | bit

    def _loses(self, mirror: dict[bytes, int], key: bytes, bit: int) -> None:
        mirror[key] = left = mirror.get(key, 0) & ~bit
        below = [mirror.get(one, 0) for one, above in self.parents.items() if above == key]
        assert left or not any(below), "a block goes, and a block below it stays"
        assert bit != Tier.DEVICE or not any(tiers & bit for tiers in below), (
            "it leaves the device, a block below it stays"
        )

    def _compare_tokens(self, task: Any, keys: list[bytes], *, own: bool) -> None:
        path_of_last = self.tokens[keys[-1]]
        size = 4 * BLOCK
        assert len(path_of_last) == size * (task.start_block_idx + task.count)
        for i, key in enumerate(keys, task.start_block_idx + 1):
            assert path_of_last.startswith(self.tokens[key])
            assert len(self.tokens[key]) == size * i, "block by block"
        if not own:
            assert task.tokens == path_of_last, "the complete path"
        elif task.residency is Residency.RESIDENT:
            assert task.tokens == path_of_last[size * task.start_block_idx :], (
                "the blocks' own tokens"
            )
        else:
            assert task.tokens == b""

    # -- comparison

    def expected(self, sink: int, key: bytes) -> int:
        """The announceable tiers of a block: those on which the block above is announceable too."""
        view, parent = self.settings.views[sink], self.parents.get(key)
        if (
            key not in self.known
            or (view.at_finish and key not in self.finished)
            or (view.by_tokens and key not in self.plain)
        ):
            return 0
        mask = self.truth.get(key, 0) & view.tiers
        mask = int(Tier.DEVICE) * bool(mask) if view.node else mask
        above = int(ALL_TIERS) if parent is None else self.expected(sink, parent)
        return 0 if not above else mask if above & Tier.DEVICE else mask & ~int(Tier.DEVICE)

    def compare(self) -> None:
        """The ledger is consistent, and each mirror is right about every block that is neither
        pending nor in flight."""
        self.book.check()
        if self.fact is not None:
            return
        orphans = {key: mask for key, mask in self.truth.items() if mask and key not in self.known}
        assert self.book.orphans.tiers == orphans, "resident blocks whose path is not known"
        for sink, mirror in enumerate(self.mirrors):
            batch = self.flying[sink]
            if sink in self.ending or (batch is not None and batch.cleared):
                continue
            in_flight = {
                key
                for task in (batch.tasks if batch is not None else ())
                for key in split_hashes(task.hashes)
            }
            pending = in_flight.union(map(self.book.tree.rows.hash, self.book.sinks[sink].dirty))
            for key in (self.known | mirror.keys()) - pending:
                expected = self.expected(sink, key)
                assert mirror.get(key, 0) == expected, "a mirror differs, and nothing is pending"

    def settle(self) -> None:
        """End the calls in flight and deliver everything that is pending. Then every mirror is
        right."""
        for sink in self.sinks:
            self.end(sink, answered=True, arrived=0)
        self.complete()
        for sink in self.sinks:
            for round_ in itertools.count():
                if not (self.book.sinks[sink].pending or self.book.sinks[sink].repeated):
                    break
                assert round_ < 10_000, "it does not settle"
                self.take(sink, 4)
                self.end(sink, answered=True, arrived=0)
                self.complete()
        self.compare()
        assert not any(view.dirty for view in self.book.sinks)
        tiers = {tier: {key for key, mask in self.truth.items() if mask & tier} for tier in Tier}
        for view in self.book.sinks:
            assert not finish(self.book.divergence_steps(view, None, tiers))
        kept = {key for key, mask in self.truth.items() if mask and key in self.known}
        assert len(self.book.tree) <= DEPTH * (len(kept) + self.settings.idle_limit), (
            "too much is remembered"
        )


def act(model: Model, rng: random.Random) -> None:
    """One action at random."""
    branch = rooted(tuple(rng.randrange(WIDTH) for _ in range(rng.randint(1, DEPTH))))
    tier, sink = rng.choice(list(Tier)), rng.choice(model.sinks)
    kind = rng.random()
    if (
        model.fact is not None or model.ending
    ) and rng.random() < 0.8:  # more often than not, deliveries end between steps
        kind = rng.choice((0.71, 0.89, 0.93, 0.93))
    if kind < 0.12:
        start = rng.randint(0, len(branch))
        model.announce(branch, start, rng.randint(0, len(branch) - start), tier)
    elif kind < 0.18:
        model.finish(branch)
    elif kind < 0.25:
        model.gain(branch, tier)
    elif kind < 0.48:
        model.lose(branch, rng.randint(1, DEPTH), tier)
    elif kind < 0.50:
        model.clear(tier)
    elif kind < 0.505:
        model.clear_everything()
    elif kind < 0.51:
        model.repeat(sink)
    elif kind < 0.515:
        model.lose_index(sink)
    elif kind < 0.70:
        model.take(sink, rng.randint(1, 8))
    elif kind < 0.88:
        model.end(sink, answered=rng.random() < 0.7, arrived=rng.choice((0, 0, 1, 2, 3, 100)))
    elif kind < 0.92:
        model.end_in_the_middle(sink, rng.randint(0, 4))
    elif kind < 0.998:
        model.go_on()
    else:
        model.settle()


def walk(seed: int, steps: int) -> Model:
    """Random actions on a ledger with random limits."""
    rng = random.Random(seed)
    model = Model(drawn(rng))
    for i in range(steps):
        act(model, rng)
        if not i % 8:
            model.compare()
    model.settle()
    return model
