"""CpuEvictor turn by turn: a message in, messages and timers out."""

from __future__ import annotations

import pytest

from kvactors.actor import PeerRestarted
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.messages import (
    Cancel,
    ClearHost,
    DropHostCopies,
    FetchDeadline,
    HostBlocksRemoved,
    HostCleared,
    LayersLoaded,
    Load,
    Loaded,
    LoadStalled,
    Offload,
    Offloaded,
    PrefetchToHost,
    Save,
    Saved,
    SaveUnanswered,
    SetTargets,
)
from kvactors.cpu_evictor.requests import Peers
from kvactors.cpu_evictor.slots import SlotState
from kvactors.device.arena import HostSlots
from kvactors.flush_notifier.messages import BlocksAdded, TierCleared
from kvactors.gpu_swapper.messages import Copied, Copy, CopyProgress, DataPlaneStatus
from kvactors.settings import HostConfig, StorageConfig
from kvactors.storage.messages import (
    ClearStore,
    DeviceFetched,
    DeviceSaved,
    FetchDevice,
    Outcome,
    Probed,
    ProbeStore,
    Read,
    ReadDone,
    ReportLost,
    SaveDevice,
    StoreCleared,
    Write,
    Written,
)
from kvactors.types import Reason, join_hashes
from tests.cpu_evictor.helpers import ROOT, path
from tests.support.probe import Probe as ProbeRef
from tests.support.stepper import Effects, Stepper


def stepped(
    *,
    slots: int = 4,
    transit: int = 4,
    mode: str = "exclusive",
    stored: bool = True,
    policy: str = "write_through",
    device_store: bool = False,
    layerwise: bool = False,
    incarnation: int = 0,
) -> Stepper[CpuEvictor]:
    pool = int(stored and not device_store)
    storage = StorageConfig(
        backend="memory" if pool else "none", write_policy=policy if pool else "none"
    )
    return Stepper(
        lambda ref: CpuEvictor(
            ref,
            config=HostConfig(slots=slots, transit_slots=transit, mode=mode),
            storage=storage,
            arena=HostSlots(slots + transit, 1),
            peers=Peers(
                ProbeRef("prefix_index"),
                ProbeRef("gpu_swapper"),
                [ProbeRef("reader", "storage_reader")] * pool,
                [ProbeRef("writer", "storage_writer")] * pool,
                ProbeRef("flush_notifier"),
                ProbeRef("storage_direct") if device_store else None,
            ),
            layerwise=layerwise,
            memory_generation=0,
        ),
        incarnation=incarnation,
    )


def told(effects: Effects) -> list[tuple[str, str]]:
    return [(one.receiver, type(one.message).__name__) for one in effects.told]


def only(effects: Effects, kind: type):
    (found,) = [one.message for one in effects.told if isinstance(one.message, kind)]
    return found


def offload(evictor: Stepper[CpuEvictor], keys: list[bytes]) -> Effects:
    """Offload a path from blocks 100, 101, .. and complete the copy."""
    parents = join_hashes([ROOT, *keys][: len(keys)])
    blocks = tuple(range(100, 100 + len(keys)))
    copy = only(evictor.turn(Offload(1, join_hashes(keys), parents, blocks)), Copy)
    return evictor.turn(Copied(copy.op, ()))


def load(keys: list[bytes], blocks=None, deadline: float = 2.0) -> Load:
    targets = tuple(range(50, 50 + len(keys))) if blocks is None else blocks
    return Load(2, ROOT, join_hashes(keys), 0, targets, deadline, fetch=True, tokens=b"")


def at_rest(evictor: Stepper[CpuEvictor]) -> None:
    evictor.actor.check()
    assert not evictor.actor.memory.loads
    assert evictor.actor.host.pinned == 0
    assert not [timer for timer in evictor._pending if not timer.handle.cancelled()]


def test_a_later_incarnation_reports_the_host_tier_empty():
    assert stepped().started.told == ()
    (one,) = stepped(incarnation=1).started.told
    assert (one.receiver, one.message.reason) == ("flush_notifier", Reason.RESTART)


def test_an_offload_and_a_load():
    evictor, keys = stepped(), path(2)
    effects = offload(evictor, keys)
    assert told(effects) == [("flush_notifier", "BlocksAdded"), ("prefix_index", "Offloaded")]
    assert set(evictor.actor.host.hashes()) == set(keys)
    effects = evictor.turn(load(keys))
    assert told(effects) == [("gpu_swapper", "Copy")]
    assert evictor.actor.host.pinned == 2
    loaded = only(evictor.turn(Copied(only(effects, Copy).op, ())), Loaded)
    assert (loaded.op, loaded.num_loaded, loaded.from_host) == (2, 2, 2)
    effects = evictor.turn(DropHostCopies(join_hashes(keys)))
    assert told(effects) == [
        ("flush_notifier", "BlocksRemoved"),
        ("prefix_index", "HostBlocksRemoved"),
    ]
    statistics = evictor.actor.host_statistics()
    assert (statistics.offloaded, statistics.loaded, statistics.free_slots) == (2, 2, 8)
    at_rest(evictor)


def test_a_load_from_storage_and_its_timer():
    evictor, keys = stepped(), path(2)
    effects = evictor.turn(load(keys))
    assert told(effects) == [("reader", "ProbeStore")]
    assert [(timer.when, type(timer.message)) for timer in effects.timers] == [(2.0, FetchDeadline)]
    effects = evictor.turn(Probed(only(effects, ProbeStore).op, 2))
    effects = evictor.turn(ReadDone(only(effects, Read).op, bytes(2)))
    assert only(evictor.turn(Copied(only(effects, Copy).op, ())), Loaded).num_loaded == 2
    evictor.turn(DropHostCopies(join_hashes(keys)))
    at_rest(evictor)
    assert evictor.elapse(10.0).told == ()


def test_storage_that_does_not_answer_by_the_deadline():
    evictor = stepped()
    probe = only(evictor.turn(load(path(2))), ProbeStore)
    assert only(evictor.elapse(3.0), Loaded).num_loaded == 0
    assert evictor.turn(Probed(probe.op, 2)).told == ()
    at_rest(evictor)


def test_a_load_is_placed_or_cancelled():
    evictor, keys = stepped(stored=False), path(2)
    offload(evictor, keys)
    assert evictor.turn(load(keys, blocks=())).told == ()
    assert evictor.turn(Cancel(2)).told == ()
    at_rest(evictor)
    evictor.turn(load(keys, blocks=()))
    copy = only(evictor.turn(SetTargets(2, (7, 8))), Copy)
    assert copy.blocks == (7, 8)
    for late in (
        SetTargets(9, (1,)),
        Cancel(9),
        FetchDeadline(9),
        SaveUnanswered(9),
        Copied(99, ()),
    ):
        assert evictor.turn(late).told == (), "an unknown number changes nothing"
    assert only(evictor.turn(Copied(copy.op, ())), Loaded).num_loaded == 2


def test_layers_of_a_load():
    evictor, keys = stepped(stored=False, layerwise=True), path(2)
    offload(evictor, keys)
    copy = only(evictor.turn(load(keys)), Copy)
    assert copy.layerwise
    assert only(evictor.turn(CopyProgress(copy.op, 3)), LayersLoaded).layers == 3
    evictor.turn(Copied(copy.op, ()))
    assert evictor.turn(CopyProgress(copy.op, 4)).told == ()


def test_a_finished_request_is_saved():
    evictor, keys = stepped(mode="inclusive"), path(2)
    effects = evictor.turn(
        Save(3, ROOT, join_hashes(keys), (4, 5), keep=True, save=(0, 1), tokens=b"")
    )
    assert told(effects) == [("reader", "ProbeStore")]
    assert [type(timer.message) for timer in effects.timers] == [SaveUnanswered]
    effects = evictor.turn(Probed(only(effects, ProbeStore).op, 0))
    effects = evictor.turn(Copied(only(effects, Copy).op, ()))
    assert told(effects) == [
        ("flush_notifier", "BlocksAdded"),
        ("writer", "Write"),
        ("prefix_index", "Saved"),
    ]
    assert only(effects, Saved).kept_mask == bytes([1, 1])
    assert evictor.turn(Written(only(effects, Write).op, bytes(2))).told == ()
    at_rest(evictor)


def test_a_store_that_does_not_answer_does_not_hold_a_finished_request():
    evictor = stepped()
    evictor.turn(Save(3, ROOT, join_hashes(path(2)), (4, 5), keep=False, save=(0, 1)))
    assert told(evictor.elapse(1.1)) == [("prefix_index", "Saved")]
    at_rest(evictor)


def test_a_device_store():
    evictor, keys = stepped(slots=0, device_store=True), path(2)
    fetch = only(evictor.turn(load(keys)), FetchDevice)
    assert only(evictor.turn(DeviceFetched(fetch.op, 1)), Loaded).num_loaded == 1
    effects = evictor.turn(Save(3, ROOT, join_hashes(keys), (4, 5), keep=False, save=(0, 1)))
    assert told(effects) == [("storage_direct", "SaveDevice")]
    assert told(evictor.turn(DeviceSaved(only(effects, SaveDevice).op, 2))) == [
        ("prefix_index", "Saved")
    ]
    at_rest(evictor)


def test_a_prefetch():
    evictor = stepped(mode="inclusive")
    probe = only(evictor.turn(PrefetchToHost(ROOT, join_hashes(path(2)), 0, 5.0)), ProbeStore)
    read = only(evictor.turn(Probed(probe.op, 2)), Read)
    effects = evictor.turn(ReadDone(read.op, bytes(2)))
    assert told(effects) == [("flush_notifier", "BlocksAdded"), ("prefix_index", "HostBlocksAdded")]
    at_rest(evictor)


def test_a_clear_of_every_tier():
    evictor = stepped()
    offload(evictor, path(2))
    effects = evictor.turn(ClearHost(storage=True, op=6))
    assert told(effects) == [("flush_notifier", "TierCleared"), ("writer", "ClearStore")]
    answer = only(evictor.turn(StoreCleared(only(effects, ClearStore).op, "no")), HostCleared)
    assert (answer.op, answer.error) == (6, "no")
    assert evictor.actor.host.hashes() == []


def test_lost_slots_hold_nothing_and_the_store_is_counted_again():
    evictor = stepped()
    offload(evictor, path(2))
    effects = evictor.turn(DataPlaneStatus(True, True, 4))
    assert told(effects) == [("flush_notifier", "TierCleared"), ("writer", "ReportLost")]
    assert isinstance(effects.told[0].message, TierCleared)
    assert isinstance(effects.told[1].message, ReportLost)
    assert evictor.actor.host.hashes() == []
    old = evictor.turn(Offload(8, join_hashes(path(1)), ROOT, (3,), memory_generation=0))
    assert only(old, Offloaded).kept_mask == bytes(1)
    copy = only(
        evictor.turn(Offload(8, join_hashes(path(1)), ROOT, (3,), memory_generation=4)), Copy
    )
    assert copy.memory_generation == 4


def test_loads_do_not_wait_for_copies_that_cannot_be_made():
    evictor = stepped()
    offload(evictor, path(1))
    evictor.turn(load(path(1)))
    probe = only(
        evictor.turn(Load(9, ROOT, join_hashes(path(2, 1)), 0, (1, 2), 2.0, fetch=True)), ProbeStore
    )
    effects = evictor.turn(DataPlaneStatus(False, False, 0))
    assert only(effects, LoadStalled).op == 2
    assert only(effects, Loaded).op == 9
    assert evictor.turn(Probed(probe.op, 2)).told == ()


def test_a_new_notifier_is_sent_the_resident_blocks():
    evictor, keys = stepped(), path(2)
    offload(evictor, keys)
    gained = only(evictor.turn(PeerRestarted("flush_notifier", 1)), BlocksAdded)
    assert set(evictor.actor.host.hashes()) == set(keys)
    assert sorted([gained.hashes[:32], gained.hashes[32:]]) == sorted(keys)


def test_requests_to_a_failed_storage_actor_are_ended():
    evictor = stepped(policy="write_back")
    offload(evictor, path(4))
    effects = evictor.turn(
        Offload(2, join_hashes(path(1, 1)), ROOT, (9,))
    )  # evicts, and so writes, one
    write, copy = only(effects, Write), only(effects, Copy)
    assert told(evictor.turn(PeerRestarted("writer", 1))) == [("flush_notifier", "BlocksRemoved")]
    assert evictor.turn(Written(write.op, bytes([Outcome.OK]))).told == ()
    evictor.turn(Copied(copy.op, ()))
    evictor.turn(load(path(2, 2)))
    effects = evictor.turn(PeerRestarted("reader", 1))
    assert only(effects, Loaded).num_loaded == 0
    at_rest(evictor)


@pytest.mark.parametrize("slots", [0, 4])
def test_a_slot_in_use_at_rest_is_found(slots):
    evictor = stepped(slots=slots)
    evictor.actor.check()
    evictor.actor.host.add(path(1)[0], ROOT, SlotState.TRANSIT)
    with pytest.raises(AssertionError, match="1 slots pinned at rest"):
        evictor.actor.check()


def test_a_block_that_leaves_is_reported_once():
    evictor, keys = stepped(policy="none", stored=False), path(4)
    offload(evictor, keys)
    effects = evictor.turn(Offload(2, join_hashes(path(1, 1)), ROOT, (9,)))
    assert told(effects) == [
        ("prefix_index", "HostBlocksRemoved"),
        ("flush_notifier", "BlocksRemoved"),
        ("gpu_swapper", "Copy"),
    ]
    assert only(effects, HostBlocksRemoved).hashes == keys[3]
