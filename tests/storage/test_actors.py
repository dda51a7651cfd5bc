"""Batches of a storage actor wait for their turn."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.actor import PeerRestarted
from kvactors.data_plane.local import LocalPlane
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, PathPart
from kvactors.identity import PLAIN
from kvactors.quotas import Quota, StorageQuotas
from kvactors.storage.actors import BATCHES_IN_FLIGHT, StorageReader, StorageWriter
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import (
    BatchDone,
    ClearStore,
    NextPage,
    Outcome,
    PathsRead,
    Probed,
    ProbeStore,
    Read,
    ReadDone,
    ReadPaths,
    ReportLost,
    StoreCleared,
    Write,
    Written,
)
from kvactors.types import Reason, split_hashes
from tests.support.effects import receiver
from tests.support.stepper import Stepper

# -- StorageReader, turn by turn.


A, B, C, D, E, ROOT = (bytes([number]) * 32 for number in (1, 2, 3, 4, 5, 6))
SIZE, NEVER = 8, 1e12


class Pool(MemoryBackend):
    """A store that must be asked."""

    def probe(self, keys):
        return None


def stepped(
    inner, kind=StorageWriter, name="storage_writer-0", incarnation=0, **options
) -> Stepper:
    plane = LocalPlane(None, Arena(4, SIZE), None, inner, store_timeout=60.0)
    return Stepper(
        lambda ref: kind(
            ref,
            backend=plane.store,
            plane=plane,
            evictor=receiver("cpu_evictor"),
            notifier=receiver("flush_notifier"),
            **options,
        ),
        name,
        incarnation=incarnation,
    )


def switched_off(ref, **parts):
    ref.switched_off = True
    return StorageWriter(ref, **parts)


def stepped_reader(inner: MemoryBackend) -> Stepper[StorageReader]:
    return stepped(inner, StorageReader, "storage_reader-0")


def end(actor: Stepper, job):
    """The turn after a job that ran to its end."""
    return actor.turn(asyncio.run(job.coroutine))


def holding_store(*keys: bytes) -> MemoryBackend:
    inner = MemoryBackend(bytes(32), SIZE)
    asyncio.run(inner.write(list(keys), [memoryview(bytes(SIZE))] * len(keys), lambda: False))
    return inner


def test_an_owned_store_answers_a_probe_in_the_same_turn():
    with stepped_reader(holding_store(A)) as reader:
        effects = reader.turn(ProbeStore(1, A + B, NEVER))
        (found,) = effects.to("cpu_evictor")
        assert (found.op, found.found, effects.jobs) == (1, 1, ())


def test_a_shared_store_is_asked_in_a_job():
    with stepped_reader(Pool(bytes(32), SIZE)) as reader:
        (job,) = reader.turn(ProbeStore(1, A, NEVER)).jobs
        (found,) = reader.fail(job, RuntimeError("broken")).to("cpu_evictor")
        assert isinstance(found, Probed)
        assert (found.op, found.found) == (1, 0)


def test_a_batch_is_answered_when_it_has_ended():
    with stepped_reader(holding_store(A)) as reader:
        (job,) = reader.turn(Read(1, A + B, (0, 1), NEVER, take=False)).jobs
        (done,) = end(reader, job).to("cpu_evictor")
        assert isinstance(done, ReadDone)
        assert list(done.outcomes) == [Outcome.OK, Outcome.MISS]


def test_batches_wait_for_those_in_flight():
    with stepped_reader(holding_store(A)) as reader:
        jobs = [reader.turn(Read(op, A, (0,), NEVER, take=False)).jobs for op in range(4)]
        assert [len(one) for one in jobs] == [1] * BATCHES_IN_FLIGHT + [0] * (4 - BATCHES_IN_FLIGHT)
        assert len(end(reader, jobs[0][0]).jobs) == 1


def test_objects_that_an_exclusive_store_hands_out_leave_it():
    inner = holding_store(A, B)
    with stepped_reader(inner) as reader:
        (job,) = reader.turn(Read(1, A, (0,), NEVER, take=True)).jobs
        effects = end(reader, job)
        (gone,) = effects.to("flush_notifier")
        assert isinstance(gone, BlocksRemoved)
        assert (gone.hashes, gone.reason) == (A, Reason.PROMOTION)
        # The index is sent the loss before the evictor is sent the bytes.
        assert [told.receiver for told in effects.told] == ["flush_notifier", "cpu_evictor"]
        assert (list(inner.objects), inner.keys()) == ([B], [B])


async def unavailable(*_arguments):
    return Outcome.UNAVAILABLE


@pytest.mark.parametrize("reason", ["unavailable", "late", "memory lost"])
def test_an_exclusive_store_keeps_objects_whose_read_failed(reason):
    inner = holding_store(A, B)
    outcome = Outcome.LATE if reason == "late" else Outcome.UNAVAILABLE
    if reason == "unavailable":
        inner.load = unavailable
    message = Read(
        1,
        A + B,
        (0, 1),
        0.0 if reason == "late" else NEVER,
        take=True,
        memory_generation=int(reason == "memory lost"),
    )
    with stepped_reader(inner) as reader:
        (job,) = reader.turn(message).jobs
        effects = end(reader, job)
        assert list(effects.to("cpu_evictor")[0].outcomes) == [outcome] * 2
        assert effects.to("flush_notifier") == []
        assert set(inner.objects) == set(inner.keys()) == {A, B}


def test_a_key_that_is_written_again_while_it_is_read_stays():
    inner = holding_store(A)
    with stepped_reader(inner) as reader:
        (job,) = reader.turn(Read(1, A, (0,), NEVER, take=True)).jobs
        inner.pending.add(A)
        effects = end(reader, job)
        assert list(effects.to("cpu_evictor")[0].outcomes) == [Outcome.OK]
        inner.pending.clear()
        assert inner.holds(A)
        assert list(inner.objects) == [A]


def test_a_corrupt_object_is_reported_and_not_read():
    inner = holding_store(A)
    inner.objects[A] = (bytes(SIZE), 1)
    with stepped_reader(inner) as reader:
        (job,) = reader.turn(Read(1, A, (0,), NEVER, take=False)).jobs
        effects = end(reader, job)
        assert effects.to("flush_notifier")[0].reason == Reason.CORRUPT
        assert list(effects.to("cpu_evictor")[0].outcomes) == [Outcome.CORRUPT]


def test_a_read_that_raises_is_unavailable_and_keeps_its_objects():
    inner = holding_store(A)
    with stepped_reader(inner) as reader:
        (job,) = reader.turn(Read(1, A, (0,), NEVER, take=True)).jobs
        effects = reader.fail(job, RuntimeError("broken"))
        assert effects.to("flush_notifier") == []
        assert list(effects.to("cpu_evictor")[0].outcomes) == [Outcome.UNAVAILABLE]
        assert inner.holds(A)


# -- StorageWriter, turn by turn.


def memory(*keys: bytes, capacity: int = 0) -> MemoryBackend:
    inner = MemoryBackend(bytes(32), SIZE, capacity)
    inner.catalog.admit(list(keys))
    return inner


def reported(writer) -> tuple[list[bytes], list[bytes]]:
    """Keys of the rest of a report: held and lost."""
    held, lost, effects = [], [], writer.started
    while True:
        for message in effects.to("flush_notifier"):
            (held if isinstance(message, BlocksAdded) else lost).extend(
                split_hashes(message.hashes)
            )
        if not effects.to(writer.actor.ref.name):
            return held, lost
        effects = writer.turn(NextPage())


def test_a_gain_is_reported_before_the_evictor_frees_the_slot():
    with stepped(memory(capacity=1)) as writer:
        (job,) = writer.turn(Write(1, A, (0,), NEVER)).jobs
        assert [type(told.message) for told in end(writer, job).told] == [BlocksAdded, Written]
        (job,) = writer.turn(Write(2, B, (0,), NEVER)).jobs
        effects = end(writer, job)
        assert [type(told.message) for told in effects.told] == [
            BlocksRemoved,
            BlocksAdded,
            Written,
        ]
        assert effects.to("flush_notifier")[0].hashes == A


def test_objects_that_a_quota_evicts_are_reported_and_not_those_it_refuses():
    inner = memory(capacity=2)
    quotas = StorageQuotas()
    quotas.set(7, Quota(storage=1))
    with stepped(inner) as writer:
        writer.actor.backend.shares.follow(quotas)
        for op, keys, salts in ((1, A, (7,)), (2, B, (8,)), (3, C + D, (7, 7))):
            slots = tuple(range(len(salts)))
            (job,) = writer.turn(Write(op, keys, slots, NEVER, 0, (), salts)).jobs
            done = end(writer, job)
        assert [*inner.catalog] == [B, D]
        (written,) = done.to("cpu_evictor")
        assert list(written.outcomes) == [Outcome.REFUSED, Outcome.OK]
        reports = done.to("flush_notifier")
        assert [type(one) for one in reports] == [BlocksRemoved, BlocksAdded]
        assert [one.hashes for one in reports] == [A, D]


def test_a_batch_that_waited_during_a_clear_is_not_written():
    """The end of a batch in flight and the end of the clear come in any order: the
    order depends on the loop."""
    inner = memory(A)
    with stepped(inner) as writer:
        running = [
            writer.turn(Write(op, A, (0,), NEVER)).jobs[0] for op in range(BATCHES_IN_FLIGHT)
        ]
        assert writer.turn(Write(8, B, (1,), NEVER)).jobs == ()
        (clear,) = writer.turn(ClearStore(9)).jobs
        assert writer.turn(Write(10, C, (2,), NEVER)).jobs == ()
        (cleared,) = end(writer, clear).to("cpu_evictor")
        assert (cleared.op, cleared.error) == (9, "")
        (before,) = end(writer, running[0]).jobs
        (after,) = end(writer, running[1]).jobs
        (late,) = end(writer, before).to("cpu_evictor")
        assert (late.op, list(late.outcomes)) == (8, [Outcome.LATE])
        (written,) = end(writer, after).to("cpu_evictor")
        assert (written.op, list(written.outcomes)) == (10, [Outcome.OK])
        assert inner.keys() == [C]


@pytest.mark.parametrize("kind", [StorageWriter, switched_off])
def test_a_restarted_writer_or_its_substitute_reports_everything_again(kind):
    with stepped(memory(A), kind, "storage_writer-1", incarnation=2) as writer:
        assert reported(writer) == ([A], [])


def test_a_restarted_notifier_is_sent_everything_by_the_first_writer():
    for name, sent in (("storage_writer-0", 1), ("storage_writer-1", 0)):
        with stepped(memory(A), name=name) as writer:
            reported(writer)
            effects = writer.turn(PeerRestarted("flush_notifier", 1))
            assert len(effects.to("flush_notifier")) == sent


def test_a_clear_that_fails_gives_the_reason():
    class Refusing(MemoryBackend):
        async def clear(self, generation=0):
            raise StoreError("the disk refuses")

    with stepped(Refusing(bytes(32), SIZE), name="storage_writer-1") as writer:
        (job,) = writer.turn(ClearStore(2)).jobs
        (cleared,) = end(writer, job).to("cpu_evictor")
        assert isinstance(cleared, StoreCleared)
        assert "the disk refuses" in cleared.error
        assert len(writer.turn(ReportLost()).jobs) == 1, "the clear is repeated"


def test_a_write_that_raises_is_unavailable():
    with stepped(memory(), name="storage_writer-1") as writer:
        (job,) = writer.turn(Write(1, A + B, (0, 1), NEVER)).jobs
        (written,) = writer.fail(job, RuntimeError("broken")).to("cpu_evictor")
        assert list(written.outcomes) == [Outcome.UNAVAILABLE] * 2


def test_the_substitute_refuses_writes_and_carries_out_clears():
    with stepped(memory(A), switched_off, "storage_writer-1", incarnation=1) as writer:
        effects = writer.turn(Write(1, A + B, (0, 1), NEVER))
        (written,) = effects.to("cpu_evictor")
        assert (list(written.outcomes), effects.jobs) == ([Outcome.UNAVAILABLE] * 2, ())
        (job,) = writer.turn(ClearStore(2)).jobs
        assert end(writer, job).to("cpu_evictor")[0].op == 2


# -- What the notifier is sent, and when.


def reports(effects) -> list:
    return [(type(one), one.hashes, one.reason) for one in effects.to("flush_notifier")]


def test_a_delayed_report_is_checked_again_and_corrected():
    inner = memory(A)
    with stepped(inner, name="storage_writer-1") as writer:
        waiting = writer.actor.context.outbox.waiting
        waiting.append(None)  # the notifier's channel is full
        (job,) = writer.turn(BatchDone(Written(1, b""), stored=A)).jobs
        inner.catalog.remove([A])
        waiting.clear()
        corrected = writer.fail(job, RuntimeError())
        assert (BlocksRemoved, A, Reason.STORAGE_EVICTION) in reports(corrected)


def test_a_batch_reports_the_changes_that_are_still_true():
    inner = memory(A, D)
    with stepped(inner, name="storage_writer-1") as writer:
        inner.catalog.departed.update((C, D, E))
        effects = writer.turn(BatchDone(Written(1, b""), stored=A + B, evicted=C + D, corrupt=E))
        assert reports(effects) == [
            (BlocksRemoved, C, Reason.STORAGE_EVICTION),
            (BlocksRemoved, E, Reason.CORRUPT),
            (BlocksAdded, A, Reason.STORED),
        ]
        assert effects.jobs == ()
        assert inner.catalog.departed == set(), "acknowledged"


def test_paths_follow_the_keys_with_the_roots_that_requests_have_now():
    inner = memory(A)
    inner.keeps_lineages = True
    with stepped(inner, root_of=lambda scope: ROOT) as writer:
        assert reported(writer) == ([A], [])
        assert writer.actor.reporting
        parts = (PathPart(ROOT, A, b"1234", PLAIN), PathPart(B, C, b"1234", PLAIN))
        (named,) = writer.turn(PathsRead(parts)).to("flush_notifier")
        assert (named.parts, named.roots) == (parts, frozenset([ROOT]))
        assert writer.turn(PathsRead(())).to("flush_notifier") == []
        (job,) = writer.turn(ReadPaths()).jobs
        writer.fail(job, OSError())
        assert not writer.actor.reporting
