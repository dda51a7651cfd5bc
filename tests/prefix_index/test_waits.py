"""Waits of PrefixIndex and their timers, turn by turn."""

from __future__ import annotations

from kvactors.prefix_index.waiting import AdmissionDeadline
from tests.prefix_index.index_machine import BLOCK, IndexMachine


def started(blocks: int) -> IndexMachine:
    machine = IndexMachine()
    machine.start(blocks, True, True, False, False, "none", 0)
    return machine


def full_of_evictable_blocks() -> IndexMachine:
    """Four blocks: three cached that nothing uses, one of a lease."""
    machine = started(4)
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
