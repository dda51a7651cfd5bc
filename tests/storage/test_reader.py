"""StorageReader, turn by turn."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.data_plane.local import LocalPlane
from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import BlocksRemoved
from kvactors.storage.actors import IN_FLIGHT, StorageReader
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome, Probed, ProbeStore, Read, ReadDone
from kvactors.types import Reason
from tests.support import probe
from tests.support.stepper import Stepper

A, B = bytes([1]) * 32, bytes([2]) * 32
SIZE, NEVER = 8, 1e12


class Pool(MemoryBackend):
    """A store that must be asked."""

    def probe(self, keys):
        return None


def stepped(inner: MemoryBackend) -> Stepper[StorageReader]:
    plane = LocalPlane(None, Arena(4, SIZE), None, inner, store_timeout=60.0)
    return Stepper(
        lambda ref: StorageReader(
            ref,
            backend=plane.store,
            plane=plane,
            evictor=probe.Probe("cpu_evictor"),
            notifier=probe.Probe("flush_notifier"),
        )
    )


def holding(*keys: bytes) -> MemoryBackend:
    inner = MemoryBackend(bytes(32), SIZE)
    asyncio.run(inner.write(list(keys), [memoryview(bytes(SIZE))] * len(keys), lambda: False))
    return inner


def end(reader: Stepper[StorageReader], job):
    """The turn after a job that ran to its end."""
    return reader.turn(asyncio.run(job.coroutine))


def test_an_owned_store_answers_a_probe_in_the_same_turn():
    with stepped(holding(A)) as reader:
        effects = reader.turn(ProbeStore(1, A + B, NEVER))
        (found,) = effects.to("cpu_evictor")
        assert (found.op, found.found, effects.jobs) == (1, 1, ())


def test_a_shared_store_is_asked_in_a_job():
    with stepped(Pool(bytes(32), SIZE)) as reader:
        (job,) = reader.turn(ProbeStore(1, A, NEVER)).jobs
        (found,) = reader.fail(job, RuntimeError("broken")).to("cpu_evictor")
        assert isinstance(found, Probed)
        assert (found.op, found.found) == (1, 0)


def test_a_batch_is_answered_when_it_has_ended():
    with stepped(holding(A)) as reader:
        (job,) = reader.turn(Read(1, A + B, (0, 1), NEVER, take=False)).jobs
        (done,) = end(reader, job).to("cpu_evictor")
        assert isinstance(done, ReadDone)
        assert list(done.outcomes) == [Outcome.OK, Outcome.MISS]


def test_batches_wait_for_those_in_flight():
    with stepped(holding(A)) as reader:
        jobs = [reader.turn(Read(op, A, (0,), NEVER, take=False)).jobs for op in range(4)]
        assert [len(one) for one in jobs] == [1] * IN_FLIGHT + [0] * (4 - IN_FLIGHT)
        assert len(end(reader, jobs[0][0]).jobs) == 1


def test_objects_that_an_exclusive_store_hands_out_leave_it():
    inner = holding(A, B)
    with stepped(inner) as reader:
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
    inner = holding(A, B)
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
    with stepped(inner) as reader:
        (job,) = reader.turn(message).jobs
        effects = end(reader, job)
        assert list(effects.to("cpu_evictor")[0].outcomes) == [outcome] * 2
        assert effects.to("flush_notifier") == []
        assert set(inner.objects) == set(inner.keys()) == {A, B}


def test_a_key_that_is_written_again_while_it_is_read_stays():
    inner = holding(A)
    with stepped(inner) as reader:
        (job,) = reader.turn(Read(1, A, (0,), NEVER, take=True)).jobs
        inner.pending.add(A)
        effects = end(reader, job)
        assert list(effects.to("cpu_evictor")[0].outcomes) == [Outcome.OK]
        inner.pending.clear()
        assert inner.holds(A)
        assert list(inner.objects) == [A]


def test_a_corrupt_object_is_reported_and_not_read():
    inner = holding(A)
    inner.objects[A] = (bytes(SIZE), 1)
    with stepped(inner) as reader:
        (job,) = reader.turn(Read(1, A, (0,), NEVER, take=False)).jobs
        effects = end(reader, job)
        assert effects.to("flush_notifier")[0].reason == Reason.CORRUPT
        assert list(effects.to("cpu_evictor")[0].outcomes) == [Outcome.CORRUPT]


def test_a_read_that_raises_is_unavailable_and_keeps_its_objects():
    inner = holding(A)
    with stepped(inner) as reader:
        (job,) = reader.turn(Read(1, A, (0,), NEVER, take=True)).jobs
        effects = reader.fail(job, RuntimeError("broken"))
        assert effects.to("flush_notifier") == []
        assert list(effects.to("cpu_evictor")[0].outcomes) == [Outcome.UNAVAILABLE]
        assert inner.holds(A)
