"""PrefixIndex and CpuEvictor turn by turn, every message and completion in any order that the
channels allow, with the bytes that move."""

from __future__ import annotations

from collections import deque
from random import Random
from types import SimpleNamespace
from typing import Any

from kvactors.actor import PeerRestarted
from kvactors.cpu_evictor.actor import CpuEvictor
from kvactors.cpu_evictor.requests import Peers
from kvactors.data_plane.base import Direction
from kvactors.errors import KVActorsError
from kvactors.gpu_swapper.messages import Copied, Copy, DataPlaneStatus
from kvactors.identity import PLAIN
from kvactors.native import HOST, Path
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import (
    Abandon,
    Acquire,
    Clear,
    Commit,
    Finish,
    Preempt,
    Prefetch,
    Ready,
)
from kvactors.prefix_index.settings import IndexSettings, Roots
from kvactors.prefix_index.tree import BlockIndex
from kvactors.settings import HostConfig, StorageConfig
from kvactors.storage.messages import Outcome, Probed, ProbeStore, Read, ReadDone, Write, Written
from kvactors.types import split_hashes
from tests.support.probe import Probe as ProbeRef
from tests.support.stepper import Stepper

BLOCK = 2
LONGEST = 6
FAMILIES = 3
JUNK = b"junk"


class TiersWalk:
    """One seeded walk. device, slots, store: which block's bytes are where (JUNK for bytes that
    mean nothing)."""

    def __init__(self, seed: int, **fixed: Any) -> None:
        self.random = random = Random(seed)
        draw = {
            "blocks": random.randint(3, 10),
            "slots": random.choice([0, 1, 2, 4, 8]),
            "transit": random.choice([1, 2, 4]),
            "mode": random.choice(["exclusive", "inclusive"]),
            "policy": random.choice(["none", "write_through", "write_back"]),
            "stored": random.random() < 0.7,
            "capacity": random.choice([2, 6, 100]),
            "low": random.choice([0, 2]),
            "losses": random.random() < 0.3,
            "failures": random.random() < 0.3,
        }
        draw.update(fixed)
        self.draw = SimpleNamespace(**draw)
        d = self.draw
        self.storage = StorageConfig(
            backend="memory" if d.stored else "none",
            write_policy=d.policy if d.stored else "none",
            timeout_s=5.0,
        )
        host = HostConfig(slots=d.slots, transit_slots=d.transit, mode=d.mode)
        exclusive = d.mode == "exclusive" or not d.slots
        self.device: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}
        self.store: dict[bytes, bytes] = {}
        self.copies: dict[int, Copy] = {}
        self.asked: dict[int, ProbeStore | Read | Write] = {}
        self.to_evictor: deque[Any] = deque()
        self.to_index: deque[Any] = deque()
        self.leases: dict[int, Path] = {}
        self.open: dict[int, Path] = {}
        self.ready: set[int] = set()
        self.number = self.memory_generation = self.served = self.reused = 0
        self.roots = Roots("model", "default", bytes(32))
        self.index = BlockIndex(BLOCK, d.blocks, 64, recompute_last_token=False)
        names = {
            name: ProbeRef(name)
            for name in ("cpu_evictor", "prefix_index", "gpu_swapper", "flush_notifier")
        }
        readers = [ProbeRef("storage_reader-0", "storage_reader")] if d.stored else []
        writers = [ProbeRef("storage_writer-0", "storage_writer")] if d.stored else []
        self.prefix: Stepper[PrefixIndex] = Stepper(
            lambda ref: PrefixIndex(
                ref,
                index=self.index,
                evictor=names["cpu_evictor"],
                swapper=names["gpu_swapper"],
                notifier=names["flush_notifier"],
                roots=self.roots,
                settings=IndexSettings(
                    exclusive=exclusive,
                    host_tier=d.slots > 0 or self.storage.saves == "write_back",
                    fetch=d.stored,
                    announce=True,
                    save=self.storage.saves,
                    free_low=d.low,
                    free_high=2 * d.low,
                ),
            )
        )
        self.evictor: Stepper[CpuEvictor] = Stepper(
            lambda ref: CpuEvictor(
                ref,
                config=host,
                storage=self.storage,
                arena=SimpleNamespace(num_slots=d.slots + d.transit, in_use=()),
                peers=Peers(
                    names["prefix_index"],
                    names["gpu_swapper"],
                    readers,
                    writers,
                    names["flush_notifier"],
                ),
                memory_generation=0,
                layerwise=False,
            )
        )

    # -- turns

    def of_index(self, effects: Any) -> Any:
        self.to_evictor += effects.to("cpu_evictor")
        for one in effects.answered:
            assert one.error is None or isinstance(one.error, (KVActorsError, ValueError)), repr(
                one.error
            )
            if isinstance(one.message, Acquire):
                path = self.open.pop(one.message.lease)
                if one.error is None:
                    self.leases[one.message.lease] = path
                    if not one.value.pending:
                        self.arrived(one.message.lease)
            elif (
                isinstance(one.message, Ready)
                and one.error is None
                and one.message.lease in self.leases
            ):
                self.arrived(one.message.lease)
        return effects

    def of_evictor(self, effects: Any) -> None:
        self.to_index += effects.to("prefix_index")
        for copy in effects.to("gpu_swapper"):
            assert len(set(copy.slots)) == len(copy.slots)
            self.copies[copy.op] = copy
        for name in ("storage_reader-0", "storage_writer-0"):
            for message in effects.to(name):
                if isinstance(message, ProbeStore | Read | Write):
                    self.asked[message.op] = message

    def ask(self, message: Any, deadline: float | None = None) -> Any:
        return self.of_index(self.prefix.turn(message, deadline=deadline))

    def arrived(self, lease: int) -> None:
        """The request's loads are over: cached blocks must hold the right bytes. The rest is
        computed now."""
        record = self.prefix.actor.leases.get(lease)
        if record is None or record.fault is not None or lease in self.ready:
            return
        path = self.leases[lease]
        blocks, keys = path.blocks(), split_hashes(path.hashes(0, path.num_full_blocks))
        for position in range(path.num_committed):
            lost = (
                self.memory_generation != self.index.memory_generation
            )  # the index has not been notified yet
            assert lost or self.device.get(blocks[position]) == keys[position], (
                "a cached block has another block's bytes"
            )
        for position in range(path.num_committed, len(blocks)):
            self.device[blocks[position]] = keys[position] if position < len(keys) else JUNK
        self.ready.add(lease)
        self.served += 1
        self.reused += path.num_committed

    # -- steps

    def acquire(self) -> None:
        if len(self.leases) + len(self.open) > 4:
            return
        self.number += 1
        path = self.path(self.random.randrange(FAMILIES), self.random.randint(1, LONGEST * BLOCK))
        self.open[self.number] = path
        deadline = self.prefix.now + self.random.choice([1.0, 4.0])
        self.ask(Acquire(self.number, f"r{self.number}", path, deadline), deadline)

    def path(self, family: int, tokens: int) -> Path:
        path = Path(BLOCK, self.roots.root(PLAIN))
        path.extend([family * 100 + i for i in range(tokens)])
        return path

    def prefetch(self) -> None:
        self.ask(
            Prefetch(
                self.path(self.random.randrange(FAMILIES), LONGEST * BLOCK), self.prefix.now + 2.0
            )
        )

    def end(self) -> None:
        if not self.leases:
            return
        lease = self.random.choice(sorted(self.leases))
        if lease not in self.ready:
            self.ask(Ready(lease))
        if lease not in self.ready and self.random.random() < 0.7:
            return
        path, how = self.leases.pop(lease), self.random.random()
        if lease in self.ready and how < 0.8:
            self.ask(Commit(lease, path.num_tokens))
        self.ready.discard(lease)
        if how < 0.6:
            self.ask(Finish(lease))
        elif how < 0.8:
            self.ask(Preempt(lease, 0))
        else:
            self.of_index(self.prefix.turn(Abandon(lease)))

    def copied(self, *, good: bool = False) -> None:
        """A copy ends: its bytes are read and written now."""
        if not self.copies:
            return
        copy = self.copies.pop(self.random.choice(sorted(self.copies)))
        failed: Any = ()
        if copy.memory_generation != self.memory_generation:
            failed = tuple(range(len(copy.blocks)))
        elif self.draw.failures and not good and self.random.random() < 0.3:
            failed = tuple(i for i in range(len(copy.blocks)) if self.random.random() < 0.5)
        for i, (block, slot) in enumerate(zip(copy.blocks, copy.slots, strict=True)):
            if copy.direction is Direction.TO_HOST:
                self.slots[slot] = JUNK if i in failed else self.device.get(block, JUNK)
            else:
                self.device[block] = JUNK if i in failed else self.slots.get(slot, JUNK)
        self.of_evictor(self.evictor.turn(Copied(copy.op, failed)))

    def stored(self, *, good: bool = False) -> None:
        """The store answers one of its requests."""
        if not self.asked:
            return
        message = self.asked.pop(self.random.choice(sorted(self.asked)))
        keys = split_hashes(message.keys)
        bad = self.draw.failures and not good and self.random.random() < 0.3
        if isinstance(message, ProbeStore):
            found = next((i for i, key in enumerate(keys) if key not in self.store), len(keys))
            self.of_evictor(self.evictor.turn(Probed(message.op, 0 if bad else found)))
            return
        outcomes = bytearray()
        bad = (
            bad or message.memory_generation != self.memory_generation
        )  # a back end does not move memory of another generation
        for key, slot in zip(keys, message.slots, strict=True):
            if isinstance(message, Write):
                outcomes.append(
                    Outcome.UNAVAILABLE
                    if bad
                    else Outcome.EXISTS
                    if key in self.store
                    else Outcome.OK
                )
                if not bad:
                    assert self.slots.get(slot) == key, (
                        "another block's bytes are stored under this key"
                    )
                    self.store.setdefault(key, key)
            elif key in self.store and not bad:
                self.slots[slot] = self.store[key]
                outcomes.append(Outcome.OK)
            else:
                self.slots[slot] = JUNK
                outcomes.append(Outcome.MISS)
        while len(self.store) > self.draw.capacity:
            del self.store[next(iter(self.store))]
        kind = Written if isinstance(message, Write) else ReadDone
        self.of_evictor(self.evictor.turn(kind(message.op, bytes(outcomes))))

    def deliver(self) -> None:
        if self.to_evictor and (not self.to_index or self.random.random() < 0.5):
            self.of_evictor(self.evictor.turn(self.to_evictor.popleft()))
        elif self.to_index:
            self.of_index(self.prefix.turn(self.to_index.popleft()))

    def elapse(self, seconds: float) -> None:
        self.of_index(self.prefix.elapse(seconds))
        self.of_evictor(self.evictor.elapse(seconds))

    def lose(self) -> None:
        """Device and host memory are lost. The index and the host tier are notified at different
        moments."""
        if self.draw.losses and self.random.random() < 0.2:
            self.memory_generation += 1
            self.to_index.append(DataPlaneStatus(True, True, self.memory_generation))
            self.device.clear()
            self.slots.clear()
            self.of_evictor(self.evictor.turn(DataPlaneStatus(True, True, self.memory_generation)))

    def clear(self) -> None:
        if self.random.random() < 0.2:
            self.ask(Clear())

    def storage_restarted(self) -> None:
        """A reader or writer has failed: what it was asked is not answered."""
        if self.draw.failures and self.random.random() < 0.3:
            name = self.random.choice(["storage_reader-0", "storage_writer-0"])
            kinds = Write if name.startswith("storage_writer") else (ProbeStore, Read)
            self.asked = {
                op: message for op, message in self.asked.items() if not isinstance(message, kinds)
            }
            self.number += 1
            self.of_evictor(self.evictor.turn(PeerRestarted(name, self.number)))

    def stall(self) -> None:
        if self.draw.losses and self.random.random() < 0.3:
            self.of_evictor(
                self.evictor.turn(DataPlaneStatus(False, False, self.memory_generation))
            )

    def step(self) -> None:
        moves = [
            (6, self.acquire),
            (5, self.end),
            (8, self.copied),
            (8, self.stored),
            (16, self.deliver),
            (1, self.prefetch),
            (1, lambda: self.elapse(self.random.choice([0.1, 1.5]))),
            (1, self.lose),
            (1, self.stall),
            (1, self.clear),
            (1, self.storage_restarted),
        ]
        weights, calls = zip(*moves, strict=True)
        self.random.choices(calls, weights)[0]()
        self.prefix.actor.check()
        self.evictor.actor.check()

    def rest(self) -> None:
        """Every lease ends, everything is answered: what the actors have of each other agrees, and
        nothing is in use."""
        for _ in range(300):
            while self.to_evictor or self.to_index or self.copies or self.asked:
                self.deliver()
                self.copied(good=True)
                self.stored(good=True)
            for lease in list(self.leases):
                del self.leases[lease]
                self.ask(Finish(lease))
            if not (self.open or self.to_evictor or self.to_index):
                break
            self.elapse(1.0)
        assert not [timer for timer in self.evictor._pending if not timer.handle.cancelled()], (
            "a timer of an ended operation"
        )
        self.elapse(60.0)
        self.look()

    def look(self) -> None:
        """Check the invariants at rest."""
        index, evictor = self.prefix.actor, self.evictor.actor
        index.check()
        evictor.check()
        assert not index.in_use()
        left = (evictor.memory.loads, self.open)
        assert not any(left), f"left over: {left}"
        assert evictor.host.pinned == evictor.host.on_device == 0
        assert self.index.free + self.index.tree.statistics()["device"] == self.index.pool.total
        assert evictor.host.free + evictor.host.resident == evictor.host.num_slots
        resident = set(evictor.host.hashes())
        for key, entry in evictor.host.blocks.items():
            assert self.slots.get(entry.slot) == key, "a host slot holds another block's bytes"
        hinted: set[bytes] = set()
        for _, _, keys, states in self.index.tree.paths():
            hinted |= {
                key for key, state in zip(split_hashes(keys), states, strict=True) if state & HOST
            }
        assert hinted <= resident, (
            f"{len(hinted - resident)} blocks are thought to be on the host, and are not"
        )
        wrong = [key for key, data in self.store.items() if data != key]
        assert not wrong

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.rest()
