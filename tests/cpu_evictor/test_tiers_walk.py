"""Index and host tier together, in every order: right bytes, no slot kept, no false alarm, hints
that are true at rest."""

from __future__ import annotations

import pytest

from kvactors.prefix_index.messages import Abandon, Acquire, Clear, Commit, Finish, Prefetch, Ready
from kvactors.storage.messages import Outcome, Write
from tests.cpu_evictor.tiers_walk import BLOCK, TiersWalk

QUIET = {
    "stored": False,
    "policy": "none",
    "losses": False,
    "failures": False,
    "low": 0,
    "capacity": 100,
}


def walked(first: int, count: int, steps: int = 250, **fixed) -> None:
    served = 0
    for seed in range(first, first + count):
        walk = TiersWalk(seed, **fixed)
        try:
            walk.run(steps)
        except Exception as error:
            error.add_note(f"walk with seed {seed}")
            raise
        served += walk.served
    assert served > count


@pytest.mark.parametrize("first", [0, 50, 100])
def test_walks_through_every_order(first):
    walked(first, 40)


@pytest.mark.parametrize(("slots", "transit"), [(0, 1), (1, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_walks_with_as_few_slots_as_there_can_be(slots, transit, policy):
    walked(1000, 25, slots=slots, transit=transit, policy=policy, stored=True)


class Calm(TiersWalk):
    """A walk whose steps the test takes, one request after another."""

    def request(self, family: int, blocks: int) -> int:
        self.number += 1
        path = self.path(family, blocks * BLOCK)
        self.open[self.number] = path
        self.ask(Acquire(self.number, "r", path, self.prefix.now + 5.0))
        return self.number

    def finish(self, lease: int) -> None:
        self.ask(Ready(lease))
        path = self.leases.pop(lease)
        self.ready.discard(lease)
        self.ask(Commit(lease, path.num_tokens))
        self.ask(Finish(lease))

    def to_host(self) -> None:
        self.of_evictor(self.evictor.turn(self.to_evictor.popleft()))

    def to_prefix(self) -> None:
        self.of_index(self.prefix.turn(self.to_index.popleft()))


def test_a_hint_sent_before_a_discard_arrived_is_taken_back():
    """A block is evicted, used, and evicted again while the first copy is in flight. The index
    discards the host's copy because of the first eviction, and the answer to the second one, sent
    before the DropHostCopies arrived, reports the block as held by the host."""
    walk = Calm(0, blocks=3, slots=4, transit=2, mode="exclusive", **QUIET)
    walk.finish(walk.request(0, 1))
    walk.finish(walk.request(2, 1))
    waiting = walk.request(1, 2)
    again = walk.request(0, 1)
    walk.of_index(walk.prefix.turn(Abandon(waiting)))
    walk.finish(again)
    walk.finish(walk.request(2, 1))
    walk.request(1, 3)
    assert len(walk.to_evictor) == 2, "two Offloads of one block"
    walk.to_host()
    walk.copied()
    walk.to_host()
    walk.rest()


@pytest.mark.parametrize("mode", ["exclusive", "inclusive"])
def test_a_hint_of_before_a_clear_is_not_about_blocks_of_after_it(mode):
    """A prefetch arrives at the host tier just before a clear does, and at an index that has a new
    tree with that block."""
    walk = Calm(0, blocks=4, slots=4, transit=2, mode=mode, **{**QUIET, "stored": True})
    key = walk.path(0, BLOCK).hashes(0, 1)
    walk.store[key] = key
    walk.ask(Prefetch(walk.path(0, BLOCK), 5.0))
    walk.to_host()
    walk.stored()
    walk.ask(Clear())
    lease = walk.request(0, 1)
    walk.stored()
    while walk.to_index:
        walk.to_prefix()
    walk.elapse(10.0)
    walk.rest()
    assert lease


def stored_again(lose) -> None:
    walk = Calm(
        0,
        blocks=4,
        slots=0,
        transit=4,
        mode="exclusive",
        **{**QUIET, "stored": True, "policy": "write_through"},
    )
    for round_ in range(3):
        lease = walk.request(0, 3)
        while walk.to_evictor or walk.to_index or walk.copies or walk.asked:
            walk.deliver()
            walk.copied()
            if walk.asked and not (round_ == 0 and lose(walk)):
                walk.stored()
        walk.finish(lease)
        while walk.to_evictor or walk.to_index or walk.copies or walk.asked:
            walk.deliver()
            walk.copied()
            if walk.asked and not (round_ == 0 and lose(walk)):
                walk.stored()
        if round_ == 1:
            assert len(walk.store) == 3, "what was not stored is offered again at the next finish"
            walk.store.pop(list(walk.store)[-1])
    assert len(walk.store) == 3, "what the store has evicted is offered again at the next finish"
    walk.rest()


@pytest.mark.parametrize("outcome", [Outcome.UNAVAILABLE, Outcome.NO_SPACE, Outcome.LATE])
def test_blocks_that_were_not_stored_are_offered_at_the_next_finish(outcome):
    from kvactors.storage.messages import Written

    def refused(walk: Calm) -> bool:
        op, message = next(iter(walk.asked.items()))
        if isinstance(message, Write):
            del walk.asked[op]
            walk.of_evictor(walk.evictor.turn(Written(op, bytes([outcome]) * len(message.slots))))
            return True
        return False

    stored_again(refused)


def test_stored_blocks_are_not_copied_again():
    walk = Calm(
        0,
        blocks=4,
        slots=0,
        transit=4,
        mode="exclusive",
        **{**QUIET, "stored": True, "policy": "write_through"},
    )
    for round_ in range(3):
        lease, copies = walk.request(0, 3), 0
        while True:
            copies += len(walk.copies)
            while walk.to_evictor or walk.to_index or walk.copies or walk.asked:
                walk.deliver()
                copies += len(walk.copies)
                walk.copied()
                walk.stored()
            if lease not in walk.leases:
                break
            walk.finish(lease)
        assert copies == (round_ == 0)
    walk.rest()


def test_a_store_that_does_not_answer_holds_the_blocks_of_a_finished_request_for_a_second():
    walk = Calm(
        0,
        blocks=4,
        slots=0,
        transit=4,
        mode="exclusive",
        **{**QUIET, "stored": True, "policy": "write_through"},
    )
    lease = walk.request(0, 3)
    while walk.to_evictor or walk.to_index or walk.asked:
        walk.deliver()
        walk.stored()
    walk.finish(lease)
    while walk.to_evictor:
        walk.to_host()
    assert walk.asked
    assert walk.prefix.actor.saves
    walk.elapse(1.1)
    while walk.to_index:
        walk.to_prefix()
    assert not walk.prefix.actor.saves
    walk.rest()
