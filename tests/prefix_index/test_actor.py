"""PrefixIndex turn by turn: one message in, and in order what it sends, answers and starts."""

from __future__ import annotations

from typing import Any

import pytest

from kvactors.cpu_evictor.messages import (
    DropHostCopies,
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
    Load,
    Loaded,
    LoadStalled,
    Offloaded,
    Saved,
)
from kvactors.errors import LeaseEnded
from kvactors.flush_notifier.messages import PathCached, TierCleared
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.loads import LATE_LOAD_S
from kvactors.prefix_index.messages import (
    Abandon,
    Commit,
    Extend,
    Finish,
    LayerReady,
    LoadDeadline,
    Preempt,
    Proceed,
    Ready,
    Withdrawn,
)
from kvactors.prefix_index.settings import IndexSettings, Roots
from tests.prefix_index.objects import BLOCK, acquire, block_index, path
from tests.support.effects import receiver
from tests.support.stepper import Stepper


def index(
    blocks: int = 8, *, part: int = 100, incarnation: int = 0, **settings: Any
) -> Stepper[PrefixIndex]:
    """A stepped index over an exclusive host tier by default."""
    chosen = {"exclusive": True, "host_tier": True, "announce": True, **settings}
    return Stepper(
        lambda ref: PrefixIndex(
            ref,
            index=block_index(blocks, part=part),
            evictor=receiver("cpu_evictor"),
            swapper=receiver("gpu_swapper"),
            notifier=receiver("flush_notifier"),
            roots=Roots("model", "a", bytes(32)),
            settings=IndexSettings(**chosen),
        ),
        incarnation=incarnation,
    )


def kinds(effects: Any) -> list[type]:
    return [type(told.message) for told in effects.told]


def served(step: Stepper[PrefixIndex], number: int, blocks: int, *, first: int = 0) -> None:
    """A request that computes all its blocks and ends."""
    assert step.turn(acquire(number, blocks, first=first)).answered[0].error is None
    assert step.turn(Finish(number, blocks * BLOCK)).answered[0].value.count == blocks


def on_host(step: Stepper[PrefixIndex], number: int, blocks: int) -> None:
    """Blocks 0 .. of a path that only the host tier has."""
    served(step, number, blocks)
    with step._inside():
        step.actor.evictions.evict(blocks)
    [offload] = step._effects().to("cpu_evictor")
    step.turn(Offloaded(offload.op, b"\1" * blocks))


def test_a_first_incarnation_reports_nothing_and_a_restarted_one_an_empty_device():
    with index() as step:
        assert step.started.told == ()
    with index(incarnation=1) as step:
        assert kinds(step.started) == [TierCleared]
        [answered] = step.turn(Commit(1, 0)).answered
        assert "lost when prefix_index was restarted" in str(answered.error)


@pytest.mark.parametrize(
    "message",
    [Commit(9, 0), Finish(9), Preempt(9, 0), Ready(9), LayerReady(9, 0), Extend(9, 0, path(1))],
    ids=lambda message: type(message).__name__,
)
def test_a_call_of_a_lease_that_has_ended_is_refused(message):
    with index() as step:
        effects = step.turn(message)
        [answered] = effects.answered
        assert isinstance(answered.error, LeaseEnded)
        assert effects.told == ()


def test_messages_about_unknown_blocks_change_nothing():
    with index() as step:
        for message in (
            Abandon(9),
            Withdrawn(9),
            Loaded(9, 1, 1),
            LoadStalled(9),
            LoadDeadline(9),
            Offloaded(9, b"\1"),
            Saved(9, b"\1"),
            HostCleared(9, ""),
            HostBlocksRemoved(bytes(32)),
            HostBlocksAdded(bytes(32)),
            Proceed(),
        ):
            effects = step.turn(message)
            assert (effects.told, effects.answered, effects.timers) == ((), (), ())
        step.actor.check()


def test_a_load_is_announced_before_the_host_may_drop_its_copy_and_then_answered():
    with index() as step:
        on_host(step, 1, 2)
        effects = step.turn(acquire(2, 3))
        [load] = effects.to("cpu_evictor")
        assert isinstance(load, Load)
        [timer] = effects.timers
        assert timer.when == 10.0 + LATE_LOAD_S
        assert effects.answered[0].value.pending
        assert step.turn(Ready(2)).answered == ()
        effects = step.turn(Loaded(load.op, 2, 2))
        assert kinds(effects) == [PathCached, DropHostCopies]
        assert effects.answered[0].value.host_hits == 2
        assert timer.handle.cancelled()


def test_a_request_that_is_queued_and_served_in_one_turn_leaves_no_timer():
    """The request before it was cancelled, so its blocks are free as soon as the queue is served."""
    with index(4) as step:
        served(step, 1, 3)
        cancelled = acquire(2, 3, first=100)
        assert step.turn(cancelled).answered == ()
        step.withdraw(cancelled)
        effects = step.turn(acquire(3, 1, first=200))
        assert [answered.error for answered in effects.answered] == [None]
        assert all(timer.handle.cancelled() for timer in effects.timers)


def test_a_hint_from_before_a_clear_or_a_loss_is_ignored():
    with index() as step:
        step.turn(acquire(1, 1))
        lease = step.actor.leases.get(1)
        assert lease is not None
        step.turn(Commit(1, BLOCK))
        keys = lease.path.hashes(0, 1)
        for hint, known in (
            (HostBlocksAdded(keys, clears=1), 0),
            (HostBlocksAdded(keys, memory_generation=1), 0),
            (HostBlocksAdded(keys), 1),
        ):
            step.turn(hint)
            assert step.actor.index_statistics().nodes == 1
            assert step.actor.index.tree.statistics()["host"] == known
        step.turn(HostBlocksRemoved(keys))
        assert step.actor.index.tree.statistics()["host"] == 0
