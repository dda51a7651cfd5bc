"""What CpuEvictor itself does: incarnations, lost memory, a new notifier, checks at rest. Its jobs
are in test_load, test_offload and test_save."""

from __future__ import annotations

import pytest

from kvactors.actor import PeerRestarted
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.messages import Offload, Offloaded
from kvactors.cpu_evictor.requests import Peers
from kvactors.cpu_evictor.slots import SlotState
from kvactors.device.arena import HostSlots
from kvactors.flush_notifier.messages import BlocksAdded, TierCleared
from kvactors.gpu_swapper.messages import Copied, Copy, DataPlaneStatus
from kvactors.settings import HostConfig, StorageConfig
from kvactors.storage.messages import ReportLost
from kvactors.types import Reason, join_hashes
from tests.cpu_evictor.helpers import ROOT, path
from tests.support.effects import receiver
from tests.support.stepper import Effects, Stepper


def stepped(slots: int = 4, incarnation: int = 0) -> Stepper[CpuEvictor]:
    return Stepper(
        lambda ref: CpuEvictor(
            ref,
            config=HostConfig(slots=slots, transit_slots=4),
            storage=StorageConfig(backend="memory"),
            arena=HostSlots(slots + 4, 1),
            peers=Peers(
                receiver("prefix_index"),
                receiver("gpu_swapper"),
                [receiver("reader", "storage_reader")],
                [receiver("writer", "storage_writer")],
                receiver("flush_notifier"),
            ),
            layerwise=False,
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


def test_a_later_incarnation_reports_the_host_tier_empty():
    assert stepped().started.told == ()
    (one,) = stepped(incarnation=1).started.told
    assert (one.receiver, one.message.reason) == ("flush_notifier", Reason.RESTART)


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
    evictor = stepped(slots)
    evictor.actor.check()
    evictor.actor.host.add(path(1)[0], ROOT, SlotState.TRANSIT)
    with pytest.raises(AssertionError, match="1 slots pinned at rest"):
        evictor.actor.check()
