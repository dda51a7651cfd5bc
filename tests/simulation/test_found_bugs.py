"""Bugs that simulation has found, reduced to small cases. The seeds are of earlier draws."""

from __future__ import annotations

import asyncio
import hashlib
from typing import ClassVar

import numpy as np
import pytest

import kvactors
from kvactors.actor import (
    Actor,
    ActorSpec,
    Control,
    Group,
    InFlight,
    Message,
    PeerRestarted,
    Supervisor,
    on,
)
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.ranks.plane import RankStore
from kvactors.data_plane.ranks.protocol import RankAnswer
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import PathCached
from kvactors.flush_notifier.view import SinkFilter
from kvactors.layout import make_layout
from kvactors.settings import (
    CacheConfig,
    Config,
    DeviceConfig,
    HostConfig,
    LayoutConfig,
    RanksConfig,
    StorageConfig,
)
from kvactors.storage.backend import SlotViews
from kvactors.storage.messages import Outcome
from kvactors.testing.fakes import SimBackend
from kvactors.testing.loop import simulate
from kvactors.types import Reason, Tier, join_hashes
from tests.flush_notifier.helpers import delivered, take
from tests.support.rank_model import RankModel
from tests.support.rank_process import keys_on_rank
from tests.support.sim_pool import SimPool
from tests.support.sim_rank import SimRank


def do(steps) -> None:
    for _ in steps:
        pass


def test_a_cut_batch_does_not_end_the_wait_for_the_tasks_left_out():
    """Seed 0: for a block that differs on two tiers one was sent, and it began to differ again."""
    ledger, tokens, keys = Ledger(1, [SinkFilter(3, node=False, at_finish=False)]), b"", []
    for number in range(8):
        tokens += np.array([number], "<u4").tobytes()
        keys.append(hashlib.sha256(tokens).digest())
    do(
        ledger.announce(
            PathCached(
                bytes(32), tokens, join_hashes(keys), 0, 8, Tier.DEVICE, Reason.COMMIT, bytes(32)
            )
        )
    )
    while ledger.sinks[0].pending:
        delivered(ledger, 0, take(ledger, 0, 100, 1))
    do(ledger.lose(keys[-1], Tier.DEVICE, Reason.DEVICE_EVICTION))
    do(ledger.gain(keys[-1], Tier.HOST, Reason.OFFLOAD))
    mark = ledger.sinks[0].clock
    delivered(ledger, 0, take(ledger, 0, 1, 1))
    assert ledger.sinks[0].pending == 1
    assert ledger.sinks[0].delivered_until < mark


class TwoRanks:
    """Two ranks that answer on the test's command."""

    def __init__(self) -> None:
        self.config = RanksConfig(count=2)
        self.healthy = True
        self.memory_generation = 0
        self.open: list[asyncio.Future[None]] = []

    async def scatter(self, build, arrived=None, *, outcomes, **_how):
        build(1)
        self.open.append(asyncio.get_running_loop().create_future())
        await self.open[-1]
        return [RankAnswer(1, bytes([Outcome.OK]) * outcomes)] * 2


def test_blocks_being_written_when_the_ranks_were_cleared_are_not_held():
    """Seed 716: the ranks emptied their stores behind that write."""

    async def main() -> None:
        group = TwoRanks()
        store = RankStore(group, 64, 1.0, exclusive=False)
        writing = asyncio.ensure_future(
            store.write([bytes([1]) * 32], SlotViews(None, [0]), lambda: False)
        )
        await asyncio.sleep(0)
        clearing = asyncio.ensure_future(store.clear())
        while len(group.open) < 2:
            await asyncio.sleep(0)
        for one in group.open:
            one.set_result(None)
        await asyncio.gather(writing, clearing)
        assert store.keys() == []

    simulate(main)


def test_two_shared_loads_that_come_short_release_no_block_twice():
    """A lease joins two loads of others, both come short, and there are no blocks to put in their
    place."""
    config = Config(
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(num_blocks=11),
        storage=StorageConfig(backend="memory"),
    )

    layout = make_layout(config.layout, 4)

    async def main() -> None:
        slow = SimPool(layout.fingerprint, layout.block_bytes, latency=lambda: 1.0)
        async with kvactors.open(config, backend=slow, inline_copies=True) as cache:
            short, long = list(range(9)), list(range(17))
            owner, second, third = [
                await cache.acquire(name, tokens)
                for name, tokens in (("a", short), ("b", long), ("c", long))
            ]
            rest = await cache.acquire("d", list(range(100, 115)))
            await owner.wait_ready()
            for lease in (second, third):
                with pytest.raises(kvactors.NoRoom):
                    await lease.wait_ready()
                lease.abandon()
            await owner.finish()
            await rest.finish()
            await cache.wait_idle()
            assert cache.check() == []
            assert cache.statistics().supervisor.failures == 0
            assert cache.statistics().prefix.blocks_free == 11

    simulate(main)


def test_blocks_that_others_load_are_not_needed_again():
    """Three blocks free, two on their way: enough for a request of five that shares these two."""
    config = Config(
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(num_blocks=6),
        storage=StorageConfig(backend="memory"),
    )
    layout = make_layout(config.layout, 4)

    async def main() -> None:
        slow = SimPool(layout.fingerprint, layout.block_bytes, latency=lambda: 1.0)
        async with (
            kvactors.open(config, backend=slow, inline_copies=True) as cache,
            await cache.acquire("a", list(range(9))),
        ):
            lease = await cache.acquire("b", list(range(17)))
            assert len(lease.block_table) == 5
            lease.abandon()

    simulate(main)


def test_writes_that_wait_when_a_rank_loses_its_memory_are_refused():
    """Seed 30139: four writes, of which a writer does two at a time. The rank fails during them and
    is back at once."""
    config = Config(
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(num_blocks=8),
        host=HostConfig(slots=8, transit_slots=8),
        layout=LayoutConfig(
            num_layers=2, num_kv_heads=2, head_dim=4, dtype="uint8", tensor_parallel=2
        ),
        storage=StorageConfig(backend="memory", write_policy="write_through", writers=1),
        ranks=RanksConfig(2, "memory://bugs", timeout_s=5.0),
    )
    layout = make_layout(config.layout, 4)

    async def main() -> None:
        stores = [
            SimBackend(layout.fingerprint, layout.block_bytes, latency=lambda: 0.5)
            for _ in range(2)
        ]
        ranks = [
            SimRank(config, number, store=stores[number], latency=lambda: 0.001)
            for number in range(2)
        ]
        model = RankModel(layout, lambda: [rank.device for rank in ranks])
        for rank in ranks:
            await rank.start()
        async with kvactors.open(config, inline_copies=True) as cache:
            for number in range(4):
                lease = await cache.acquire("a", list(range(100 * number, 100 * number + 5)))
                await lease.wait_ready()
                await model.fill(lease.block_table[:1], lease.hashes(0, 1))
                await lease.commit(4)
                await lease.finish()
            await asyncio.sleep(0.1)
            await ranks[0].stop()
            await ranks[0].start()
            await cache.wait_idle(60.0)
            for number, store in enumerate(stores):
                wrong = [
                    key
                    for key, (data, _) in store.objects.items()
                    if data != model.bytes_of(keys_on_rank(key, number))
                ]
                assert wrong == []
        for rank in ranks:
            await rank.close()

    simulate(main)


class Note(Message, frozen=True, eq=False):
    value: int


class Push(Control, frozen=True, eq=False):
    values: tuple[int, ...]


class Die(Control, frozen=True, eq=False):
    pass


class Frail(Actor):
    ROLE = "frail"

    def __init__(self, ref):
        super().__init__(ref)
        self.notes = []

    @on(Note)
    def note(self, message):
        self.notes.append(message.value)

    @on(Die)
    def die(self, message):
        raise RuntimeError("planted")


class Busy(Actor):
    """Its job runs to its end in every case, as a copy does, so its group is away for a while."""

    ROLE = "busy"

    def __init__(self, ref, release):
        super().__init__(ref)
        self.release = release

    def started(self):
        self.start_job(wait_uncancelled(self.release), lambda _: Push(()), lambda _: Push(()))

    @on(Push)
    def pushed(self, message):
        """The job is over."""


class Sender(Actor):
    ROLE = "sender"
    SENDS: ClassVar = {"frail": (Note,)}

    def __init__(self, ref, frail):
        super().__init__(ref)
        self.frail, self.heard = frail, 0

    @on(Push)
    def push(self, message):
        for value in message.values:
            self.tell(self.frail, Note(value))

    @on(PeerRestarted)
    def restarted(self, message):
        self.heard += 1


@pytest.mark.parametrize("seed", range(3))
def test_messages_sent_before_a_failure_was_reported_do_not_reach_the_next_incarnation(seed):
    """Seed 20228: a load that the index had written off was carried out by the host tier's next
    incarnation, which was not notified of the cancellation."""

    async def main() -> None:
        supervisor, release = Supervisor(InFlight()), asyncio.get_running_loop().create_future()
        frail, sender, busy = (
            supervisor.make_ref(Frail, 1),
            supervisor.make_ref(Sender, 8),
            supervisor.make_ref(Busy, 8),
        )
        members = (
            Group("one", (ActorSpec(Sender, lambda ref: Sender(ref, frail), sender),)),
            Group(
                "both",
                (
                    ActorSpec(Frail, Frail, frail),
                    ActorSpec(Busy, lambda ref: Busy(ref, release), busy),
                ),
            ),
        )
        async with supervisor.running(*members):
            frail.try_tell(Die())
            await asyncio.sleep(1.0)
            assert frail.incarnation == 1
            sender.try_tell(Push((1, 2, 3)))
            await asyncio.sleep(1.0)
            release.set_result(None)
            await supervisor.in_flight.wait_idle()
            assert supervisor.actor("sender").heard == 2
            assert supervisor.actor("frail").notes == []
            sender.try_tell(Push((4, 5)))
            await supervisor.in_flight.wait_idle()
            assert supervisor.actor("frail").notes == [4, 5]

    simulate(main, seed)
