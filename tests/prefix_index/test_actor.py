"""PrefixIndex turn by turn: one message in, and in order what it sends, answers and starts."""

from __future__ import annotations

from typing import Any

import pytest

from kvactors.actor import PeerRestarted
from kvactors.cpu_evictor.messages import (
    ClearHost,
    DropHostCopies,
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
    Load,
    Loaded,
    LoadStalled,
    Offload,
    Offloaded,
    PrefetchToHost,
    Save,
    Saved,
)
from kvactors.errors import DeadlineExceeded, LeaseEnded, Paused, RankLost
from kvactors.flush_notifier.messages import (
    BlocksRemoved,
    NamespaceChanged,
    PathCached,
    TierCleared,
)
from kvactors.gpu_swapper.messages import DataPlaneStatus
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.loads import LATE_LOAD_S
from kvactors.prefix_index.messages import (
    Abandon,
    Clear,
    Commit,
    Extend,
    Finish,
    LayerReady,
    LoadDeadline,
    Pause,
    Preempt,
    Prefetch,
    Proceed,
    Ready,
    Resume,
    SetNamespace,
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


def test_a_request_from_acquire_to_finish():
    with index() as step:
        [answered] = step.turn(acquire(1, 3)).answered
        assert len(answered.value.blocks) == 3
        effects = step.turn(Commit(1, 2 * BLOCK))
        assert kinds(effects) == [PathCached]
        assert effects.answered[0].value.count == 2
        effects = step.turn(Finish(1, 3 * BLOCK))
        assert kinds(effects) == [PathCached, PathCached], "the commit, then the finish"
        assert effects.answered[0].value.count == 3
        step.actor.check()


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


@pytest.mark.parametrize("stalled", [False, True])
def test_a_load_without_an_answer_is_computed_in_other_blocks(stalled):
    with index() as step:
        on_host(step, 1, 2)
        effects = step.turn(acquire(2, 3))
        [load] = effects.to("cpu_evictor")
        step.turn(Ready(2))
        effects = step.turn(LoadStalled(load.op)) if stalled else step.elapse(12.0)
        [answered] = effects.answered
        assert answered.value.cached_tokens == 0
        assert not set(answered.value.blocks) & set(load.blocks)
        assert step.actor.index_statistics().overdue_loads == 1


def test_a_request_waits_for_an_eviction_until_its_deadline():
    with index(4) as step:
        served(step, 1, 4)
        message = acquire(2, 3, first=100)
        effects = step.turn(message)
        [offload] = effects.to("cpu_evictor")
        assert isinstance(offload, Offload)
        assert len(effects.timers) == 1
        [answered] = step.elapse(10.0).answered
        assert isinstance(answered.error, DeadlineExceeded)
        effects = step.turn(Offloaded(offload.op, b"\1\1\1"))
        assert kinds(effects) == [BlocksRemoved]
        assert effects.answered == ()
        assert step.turn(acquire(3, 3, first=200)).answered[0].error is None


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


def test_a_saved_path_is_held_until_it_is_answered():
    with index(exclusive=False) as step:
        assert step.turn(acquire(1, 2)).answered
        effects = step.turn(Finish(1, 2 * BLOCK))
        [admit] = effects.to("cpu_evictor")
        assert isinstance(admit, Save)
        assert step.actor.index_statistics().evictable == 0
        step.turn(Saved(admit.op, b"\1\1"))
        assert step.actor.index_statistics().evictable == 2


def test_a_pause_is_answered_when_nothing_is_in_flight_and_holds_requests():
    with index() as step:
        on_host(step, 1, 2)
        [load] = step.turn(acquire(2, 3)).to("cpu_evictor")
        assert step.turn(Pause()).answered == ()
        held = step.turn(acquire(3, 1, first=50))
        assert (held.answered, len(held.timers)) == ((), 1)
        [pause] = step.turn(Loaded(load.op, 2, 2)).answered
        assert isinstance(pause.message, Pause)
        [expired] = step.elapse(10.0).answered
        assert isinstance(expired.error, Paused)
        step.turn(acquire(4, 1, first=60))
        resumed, granted = step.turn(Resume()).answered
        assert {type(resumed.message), type(granted.message)} == {Resume, type(acquire(4, 1))}


def test_a_clear_with_the_store_is_answered_by_the_host_tier():
    with index() as step:
        served(step, 1, 2)
        effects = step.turn(Clear(storage=True))
        assert kinds(effects)[:2] == [TierCleared, ClearHost]
        assert effects.answered == ()
        [clear] = [one for one in effects.to("cpu_evictor") if isinstance(one, ClearHost)]
        [answered] = step.turn(HostCleared(clear.op, "")).answered
        assert answered.value.count == 2


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


def test_lost_device_memory_fails_every_lease_and_reports_an_empty_device():
    with index() as step:
        step.turn(acquire(1, 2))
        effects = step.turn(DataPlaneStatus(available=True, memory_lost=True, generation=3))
        assert kinds(effects)[0] is TierCleared
        assert step.actor.index.memory_generation == 3
        for call in (Ready(1), Commit(1, 1), Extend(1, 2 * BLOCK, path(1))):
            assert isinstance(step.turn(call).answered[0].error, RankLost)
        assert step.turn(Finish(1)).answered[0].error is None


def test_copies_that_stall_let_requests_have_other_blocks():
    with index(6) as step:
        served(step, 1, 3)
        served(step, 2, 3, first=100)
        step.turn(acquire(3, 3, first=200))
        effects = step.turn(DataPlaneStatus(available=False, memory_lost=False, generation=0))
        assert kinds(effects) == [Offload]
        effects = step.turn(DataPlaneStatus(available=True, memory_lost=False, generation=0))
        assert effects.told == ()


def test_a_restarted_host_tier_answers_nothing_that_was_in_flight():
    with index(exclusive=False, fetch=True, save="write_through") as step:
        [first] = step.turn(acquire(1, 2)).to("cpu_evictor")
        step.turn(Loaded(first.op, 0, 0))
        assert step.turn(Finish(1, 2 * BLOCK)).answered[0].error is None
        [load] = step.turn(acquire(2, 4)).to("cpu_evictor")
        step.turn(Ready(2))
        step.turn(Clear(storage=True))
        effects = step.turn(PeerRestarted("cpu_evictor", 1))
        assert [type(one) for one in effects.to("cpu_evictor")] == [ClearHost], "the open clear"
        ready = [one for one in effects.answered if isinstance(one.message, Ready)]
        assert ready[0].value.cached_tokens == 2 * BLOCK
        assert step.turn(Loaded(load.op, 2, 2)).told == ()
        assert step.actor.index_statistics().saves_in_flight == 0


def test_another_namespace_is_reported_once():
    with index() as step:
        served(step, 1, 1)
        assert kinds(step.turn(SetNamespace("b"))) == [NamespaceChanged]
        assert kinds(step.turn(SetNamespace("b"))) == []
        assert step.turn(acquire(2, 2)).answered[0].value.device_hits == 0


def test_a_prefetch_asks_the_host_for_blocks_missing_on_the_device():
    with index(fetch=True) as step:
        served_by_fetch(step)
        effects = step.turn(Prefetch(path(3), 5.0))
        [prefetch] = effects.to("cpu_evictor")
        assert isinstance(prefetch, PrefetchToHost)
        assert prefetch.start == 1
        assert effects.answered[0].value.count == 2
        assert step.turn(Prefetch(path(1), 5.0)).answered[0].value.count == 0


def served_by_fetch(step: Stepper[PrefixIndex]) -> None:
    """One block on the device, and an empty store."""
    [load] = step.turn(acquire(1, 1)).to("cpu_evictor")
    step.turn(Loaded(load.op, 0, 0))
    step.turn(Finish(1, BLOCK))


def test_an_abandoned_extend_is_withdrawn():
    with index(4) as step:
        served(step, 1, 3)
        step.turn(acquire(2, 1, first=100))
        extend = Extend(2, BLOCK, path(2))
        assert step.turn(extend).answered == ()
        assert step.turn(Withdrawn(2)).answered == (), "its caller still waits"
        step.withdraw(extend)
        step.turn(Withdrawn(2))
        assert not step.actor.queue.waiting
