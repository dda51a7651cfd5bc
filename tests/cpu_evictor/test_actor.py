"""CpuEvictor turn by turn: a message in, messages and timers out."""

from __future__ import annotations

import pytest

from kvactors.actor import PeerRestarted
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.messages import (
    Cancel,
    ClearHost,
    FetchDeadline,
    HostCleared,
    LayersLoaded,
    Load,
    Loaded,
    Offload,
    Offloaded,
    Save,
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
    ReportLost,
    SaveDevice,
    StoreCleared,
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


def test_a_new_notifier_is_sent_the_resident_blocks():
    evictor, keys = stepped(), path(2)
    offload(evictor, keys)
    gained = only(evictor.turn(PeerRestarted("flush_notifier", 1)), BlocksAdded)
    assert set(evictor.actor.host.hashes()) == set(keys)
    assert sorted([gained.hashes[:32], gained.hashes[32:]]) == sorted(keys)


@pytest.mark.parametrize("slots", [0, 4])
def test_a_slot_in_use_at_rest_is_found(slots):
    evictor = stepped(slots=slots)
    evictor.actor.check()
    evictor.actor.host.add(path(1)[0], ROOT, SlotState.TRANSIT)
    with pytest.raises(AssertionError, match="1 slots pinned at rest"):
        evictor.actor.check()
