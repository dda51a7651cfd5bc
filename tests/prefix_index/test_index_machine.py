"""No order of requests, completions, stalls, restarts and losses makes PrefixIndex fail, leak a
block or give one to two requests."""

from __future__ import annotations

from random import Random

import pytest

from kvactors.cpu_evictor.messages import LayersLoaded, Loaded
from kvactors.errors import LeaseEnded
from kvactors.prefix_index.messages import Abandon, Ack, Commit, Finish, LayerReady, Ready
from kvactors.prefix_index.waiting import AdmissionDeadline
from tests.prefix_index.index_machine import BLOCK, LONGEST, IndexMachine


def started(blocks: int, *, host: bool = True, fetch: bool = True) -> IndexMachine:
    machine = IndexMachine()
    machine.start(blocks, True, host, fetch, False, "none", 0)
    return machine


def test_a_waiting_request_does_not_join_a_load_that_has_stalled() -> None:
    """The second request shares the first one's load and waits for an eviction. The load stalls,
    the eviction ends: the second request must get blocks that no copy writes to, and may commit
    them however the load ends."""
    machine = started(8)
    machine.acquire(1, 5 * BLOCK, 5.0, True)
    machine.loaded(0, 0, False)
    machine.commit(0, 0)
    machine.finish(0)
    machine.acquire(0, 2 * BLOCK, 5.0, True)
    machine.acquire(0, 4 * BLOCK, 5.0, True)
    machine.consistent()
    assert machine.open, "the second request must wait for room"
    machine.stalled(0)
    machine.offloaded(0, 0)
    machine.consistent()
    assert len(machine.leases) == 2
    assert not any(load.lost for lease in machine.actor.leases for load in lease.loads)
    while machine.loads:
        machine.loaded(0, 0, False)
    for which in range(len(machine.leases)):
        machine.commit(which, 0)
        machine.consistent()
    machine.teardown()


def behind_a_failed_load() -> IndexMachine:
    """Lease 1 loads block 0. Leases 2 and 3 wait for that and for block 1, which lease 2 loads. The
    load of block 0 fails."""
    machine = started(8, host=False)
    machine.acquire(0, BLOCK, 5.0, True)
    machine.acquire(0, 2 * BLOCK, 5.0, True)
    machine.acquire(0, 2 * BLOCK, 5.0, True)
    machine.loaded(0, 0, False)
    return machine


def test_a_lease_computes_into_no_block_that_arrived_behind_a_load_that_failed() -> None:
    """Another request computes block 0, so that block 1 would be hit when it arrives, while those
    who have waited for it compute it."""
    machine = behind_a_failed_load()
    machine.commit(0, 0)
    machine.loaded(0, 1, False)
    machine.consistent()
    tables = [machine.lease_state(number).path for number in (1, 2, 3)]
    for path in tables[1:]:
        assert path.num_committed == 0
        assert not any(map(path.is_shared, range(2)))
    assert len({block for path in tables for block in path.blocks()}) == 5
    for number in (2, 3):
        [ready] = machine.turn(Ready(number)).answered
        assert ready.value.cached_tokens == 0
        assert list(ready.value.blocks) == tables[number - 1].blocks()
    machine.commit(1, 0)
    machine.consistent()
    machine.teardown()


def test_a_lease_that_joined_such_a_load_computes_into_new_blocks() -> None:
    """Its owner has ended, so the block is cached for later requests."""
    machine = behind_a_failed_load()
    machine.commit(0, 0)
    machine.turn(Abandon(2))
    del machine.leases[2]
    machine.loaded(0, 1, False)
    machine.consistent()
    path = machine.lease_state(3).path
    assert path.num_committed == 0
    assert not any(map(path.is_shared, range(2)))
    machine.acquire(0, 2 * BLOCK, 5.0, True)
    assert machine.lease_state(4).path.num_committed == 2
    machine.teardown()


def test_a_request_that_came_later_still_gets_a_block_that_its_owner_computes() -> None:
    """It hits block 0, and has joined the load of block 1. That is given up for its owner: the
    request gets another block."""
    machine = behind_a_failed_load()
    machine.commit(0, 0)
    machine.acquire(0, 2 * BLOCK, 5.0, True)
    machine.loaded(0, 1, False)
    machine.consistent()
    path = machine.lease_state(4).path
    assert path.num_committed == 1
    assert path.blocks(1, 2) != machine.lease_state(2).path.blocks(1, 2)
    machine.teardown()


def test_a_layer_is_not_answered_while_another_lease_loads_blocks_that_are_to_be_computed() -> None:
    """Its owner computes them in its targets, the others in new blocks, which come with the
    answer."""
    machine = behind_a_failed_load()
    [op] = machine.loads
    assert machine.turn(LayersLoaded(op, 1, 1)).answered == ()
    [own] = machine.turn(LayerReady(2, 0)).answered
    assert own.value.cached_tokens == 0
    assert list(own.value.blocks) == machine.lease_state(2).path.blocks()
    assert machine.turn(LayerReady(3, 0)).answered == ()
    [joined] = machine.turn(Loaded(op, 1, 0)).answered
    machine.loads.clear()
    assert joined.value.cached_tokens == 0
    assert list(joined.value.blocks) == machine.lease_state(3).path.blocks()
    assert not {*joined.value.blocks} & {*own.value.blocks}
    machine.consistent()
    machine.teardown()


def test_a_commit_that_the_tree_refuses_ends_that_lease_alone() -> None:
    machine = started(4)
    machine.acquire(0, 2 * BLOCK, 5.0, True)
    machine.loaded(0, 2, True)
    machine.acquire(1, BLOCK, 5.0, True)
    machine.loaded(0, 0, True)
    (first, second) = machine.actor.leases
    second.tree.replace(second.path, 0, -1)
    effects = machine.turn(Commit(second.id, BLOCK))
    assert isinstance(effects.answered[0].error, LeaseEnded)
    assert isinstance(machine.turn(Commit(first.id, 2 * BLOCK)).answered[0].value, Ack)
    machine.turn(Finish(second.id))


def full_of_evictable_blocks() -> IndexMachine:
    """Four blocks: three cached that nothing uses, one of a lease."""
    machine = started(4, fetch=False)
    machine.acquire(1, 3 * BLOCK, 5.0, True)
    machine.commit(0, 0)
    machine.finish(0)
    machine.acquire(0, BLOCK, 5.0, True)
    return machine


def test_a_late_timer_of_an_earlier_wait_is_ignored() -> None:
    machine = full_of_evictable_blocks()
    lease = machine.lease(0)
    machine.extend(0, BLOCK)
    first = machine.actor.queue.waiting[lease]
    machine.offloaded(0, 255)
    assert not machine.actor.queue.waiting
    machine.extend(0, BLOCK)
    assert machine.actor.queue.waiting[lease] is not first
    machine.turn(AdmissionDeadline(first))
    assert lease in machine.actor.queue.waiting, "the wait was ended by the timer of an earlier one"
    machine.offloaded(0, 255)
    assert machine.leases[lease] == 3 * BLOCK
    machine.teardown()


def test_no_timer_is_left_when_a_wait_is_over() -> None:
    machine = full_of_evictable_blocks()

    def timers() -> int:
        return sum(not one.handle.cancelled() for one in machine.stepper._pending)

    machine.extend(0, BLOCK)
    assert timers() == 1
    machine.offloaded(0, 255)
    assert timers() == 0, "the wait for room was served"
    machine.extend(0, BLOCK)
    machine.cancel_extend(0)
    assert timers() == 0, "the wait for room was cancelled"
    machine.offloaded(0, 255)
    machine.pause(0)
    machine.acquire(0, 1, 5.0, True)
    machine.acquire(1, 1, 5.0, True)
    assert timers() == 2
    machine.abandon(len(machine.leases) + 1)
    assert timers() == 1, "a held request was given up"
    machine.resume()
    assert timers() == 0, "the held request was admitted"
    machine.teardown()


WITH_SINK = 400
"""Walks with a sink. Of those that follow every third one has none."""

MEDIA = [(), (), ((1, 4),), ((1, 2), (3, 5))]


class Walk:
    """A seeded walk through the same machine: states that need many steps, which short examples do
    not reach."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.machine = IndexMachine()
        draw = self.random.choice
        flags = [draw([True, False]) for _ in range(3)]
        self.machine.start(
            self.random.randint(3, 9),
            *flags,
            draw([True, False]),
            draw(["none", "write_through"]),
            draw([0, 0, 2]),
            draw([1, 2, 100]),
            seed < WITH_SINK or seed % 3 > 0,
        )

    def step(self) -> None:
        machine, number, draw = self.machine, self.random.randrange, self.random.choice
        which = number(31)
        moves = [
            (
                9,
                lambda: machine.acquire(
                    number(2),
                    number(LONGEST * BLOCK) + 1,
                    draw([1.0, 5.0]),
                    number(4) > 0,
                    draw(MEDIA),
                    number(4) == 0,
                    draw([0, 0, 0, 1, BLOCK + 1]),
                ),
            ),
            (4, lambda: machine.leases and machine.commit(which, draw([0, 0, 1, 2]))),
            (
                2,
                lambda: (
                    machine.leases and machine.extend(which, number(BLOCK) + 1, draw([0, 0, 0, 1]))
                ),
            ),
            (
                1,
                lambda: (
                    machine.leases
                    and machine.reserve(which, number(2 * BLOCK + 1), draw([0, 0, 0, 1]))
                ),
            ),
            (
                1,
                lambda: (
                    machine.leases
                    and machine.truncate(which, number(2 * BLOCK + 1), draw([0, 0, 0, 1]))
                ),
            ),
            (
                1,
                lambda: (
                    machine.leases and machine.step(which, number(BLOCK + 2), draw([None, 0, 1]))
                ),
            ),
            (1, lambda: machine.leases and machine.next_chunk(which, number(2 * BLOCK) + 1)),
            (
                2,
                lambda: (
                    machine.leases
                    and machine.fork(
                        which, number(2) + 1, draw([0, 0, 0, 1]), number(4) > 0, number(3) == 0
                    )
                ),
            ),
            (1, lambda: machine.cancel_fork(which)),
            (3, lambda: machine.copies and machine.copied(which, draw([(), (), (0,)]))),
            (2, lambda: machine.leases and machine.ready(which)),
            (1, lambda: machine.leases and machine.layer_ready(which, number(2))),
            (4, lambda: machine.leases and machine.finish(which)),
            (1, lambda: machine.leases and machine.preempt(which, number(2))),
            (1, lambda: machine.abandon(which)),
            (1, lambda: machine.leases and machine.cancel_extend(which)),
            (1, lambda: machine.set_namespace(draw(["a", "b"]))),
            (
                4,
                lambda: machine.loads and machine.loaded(which, number(LONGEST + 1), number(2) > 0),
            ),
            (2, lambda: machine.loads and machine.stalled(which)),
            (1, lambda: machine.loads and machine.layers(which, number(2) + 1)),
            (4, lambda: machine.offloads and machine.offloaded(which, draw([0, 255, number(256)]))),
            (3, lambda: machine.admits and machine.admitted(which, number(256))),
            (2, lambda: machine.elapse(draw([0.5, 2.5]))),
            (1, lambda: machine.hint(number(2), number(4), number(3) > 0)),
            (1, lambda: machine.device_lost(number(6))),
            (1, lambda: machine.host_ahead_of_the_index(number(4))),
            (1, lambda: machine.evictor_restarted(number(6))),
            (1, lambda: machine.notifier_restarted(number(6))),
            (8, lambda: machine.works and machine.go_on(which)),
            (1, lambda: machine.clear(number(4))),
            (2, lambda: machine.sweeps and machine.sweep(number(4) + 1)),
            (1, lambda: machine.pause(number(4))),
            (2, machine.resume),
        ]
        weights, calls = zip(*moves, strict=True)
        self.random.choices(calls, weights)[0]()
        machine.consistent()


@pytest.mark.parametrize("first", range(0, WITH_SINK + 200, 100))
def test_long_walks_through_every_order(first: int) -> None:
    for seed in range(first, first + 100):
        walk = Walk(seed)
        try:
            for _ in range(150):
                walk.step()
            walk.machine.teardown()
        except Exception as error:
            error.add_note(f"walk with seed {seed}")
            raise
