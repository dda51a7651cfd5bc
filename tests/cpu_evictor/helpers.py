"""A host tier without a loop: its pure objects over refs that only have names, and a clock that the
test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from kvactors.actor import ActorRef, Message
from kvactors.cpu_evictor.load import LoadJob
from kvactors.cpu_evictor.memory import HostMemory
from kvactors.cpu_evictor.messages import Load
from kvactors.cpu_evictor.requests import Peers, RequestTable
from kvactors.cpu_evictor.slots import HostBlock, HostTier, SlotState
from kvactors.data_plane.base import Direction
from kvactors.gpu_swapper.messages import Copied, Copy
from kvactors.settings import HostConfig, StorageConfig
from kvactors.storage.messages import Outcome, Probed, ProbeStore, Read, ReadDone, Write, Written
from kvactors.types import split_hashes
from tests.support.effects import RecordedEffects, Started, receiver

ROOT = bytes(32)


def hash_of(name: object) -> bytes:
    """A block hash."""
    return sha256(repr(name).encode()).digest()


def path(length: int, family: int = 0) -> list[bytes]:
    """Block hashes of a path."""
    return [hash_of((family, position)) for position in range(length)]


def joined(hashes: Sequence[bytes]) -> bytes:
    """As messages carry them."""
    return b"".join(hashes)


def is_resident(tier: HostTier, block_hash: bytes) -> bool:
    """Whether a block counts against the capacity. Its bytes may be arriving."""
    block = tier.blocks.get(block_hash)
    return block is not None and block.state is SlotState.RESIDENT


class Out(RecordedEffects):
    """Effects, and the names of the actors that messages went to, the last one last."""

    def __init__(self) -> None:
        super().__init__()
        self.receivers: list[str] = []
        bound: Any = self
        bound.send = self._send

    def _send(self, to: ActorRef[Any], message: Message) -> None:
        self.receivers.append(to.name)
        self.done.append(message)


class Host:
    """A host tier of `slots` resident blocks and `transit` more slots."""

    def __init__(
        self,
        slots: int = 4,
        transit: int = 4,
        *,
        mode: str = "exclusive",
        stored: bool = True,
        policy: str = "write_through",
        readers: int = 1,
        writers: int = 1,
        device_store: bool = False,
        **storage: Any,
    ) -> None:
        stored = stored and not device_store
        self.now = 0.0
        self.config = HostConfig(slots=slots, transit_slots=transit, mode=mode)  # type: ignore[arg-type]
        self.storage = StorageConfig(
            backend="memory" if stored else "none",
            write_policy=policy if stored else "none",  # type: ignore[arg-type]
            **storage,
        )
        self.peers = Peers(
            index=receiver("prefix_index"),
            swapper=receiver("gpu_swapper"),
            readers=[
                receiver(f"storage_reader-{i}", "storage_reader") for i in range(readers * stored)
            ],
            writers=[
                receiver(f"storage_writer-{i}", "storage_writer") for i in range(writers * stored)
            ],
            notifier=receiver("flush_notifier"),
            device_store=receiver("storage_direct") if device_store else None,
        )
        self.tier = HostTier(slots, slots + transit)
        self.out = Out()
        self.requests = RequestTable(self.peers, self.storage, 0, lambda: self.now, self.out)
        self.memory = HostMemory(self.tier, self.requests, self.config, self.storage, flat=False)
        self._timers: list[Started] = []

    def run(self, call: Callable[..., object], *arguments: Any) -> list[Any]:
        """The messages and timers of a call."""
        self.out.take()
        call(*arguments)
        effects = self.out.take()
        self._timers += [one for one in effects if isinstance(one, Started)]
        return effects

    def end(self, completion: Any) -> list[Any]:
        """The messages and timers of the end of a request."""
        return self.run(self.memory.completed, completion)

    @property
    def timers(self) -> list[Started]:
        """The timers that run."""
        return [one for one in self._timers if not one.cancelled]

    def fill(self, hashes: Sequence[bytes], state: SlotState = SlotState.RESIDENT) -> None:
        """Put blocks of one path into slots, the last one first, as if they had been offloaded."""
        blocks: list[HostBlock] = []
        for position in reversed(range(len(hashes))):
            parent = hashes[position - 1] if position else ROOT
            blocks.append(self.tier.add(hashes[position], parent, state))
        self.tier.land(blocks, frozenset())
        self.memory.announce([block.hash for block in blocks])

    def load(self, hashes: Sequence[bytes], **fields: Any) -> LoadJob:
        """A load of blocks `start`.. into device blocks 100, 101, .."""
        start = fields.pop("start", 0)
        layerwise = fields.pop("layerwise", False)
        blocks = tuple(range(100, 100 + len(hashes) - start))
        given = {"blocks": blocks, "deadline": 10.0, "fetch": True, **fields}
        message = Load(7, ROOT, joined(hashes), start, **given)
        return LoadJob(self.memory, message, layerwise=layerwise)

    def idle(self) -> None:
        """Nothing is in flight: no slot is pinned or in transit, every count is right."""
        self.tier.check()
        assert not self.timers
        assert not self.requests.holds_slots
        assert not self.memory.loads
        assert self.tier.pinned == 0
        assert self.tier.in_transit == 0


def sent(effects: Sequence[Any], *kinds: type) -> list[Any]:
    """The messages among effects, of these types if any are given, in order."""
    return [one for one in effects if isinstance(one, kinds or Message)]


def names(effects: Sequence[Any]) -> list[str]:
    """Types of the effects."""
    return [type(one).__name__ for one in effects]


class Movements:
    """The actors around a host tier: bytes move when a request is completed, in any order.

    Attributes:
        device, slots, store: which block's bytes are where.
        sent: every message, in order.
        open: requests that wait for `complete`.
    """

    def __init__(self, host: Host, store: Sequence[bytes] = ()) -> None:
        self.host = host
        self.device: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}
        self.store = set(store)
        self.sent: list[Message] = []
        self.open: list[Copy | ProbeStore | Read | Write] = []

    def holds(self) -> None:
        """The bytes of every block that is readable now are in its slot."""
        for block in self.host.tier.blocks.values():
            if not block.arriving:
                self.slots[block.slot] = block.hash

    def run(self, call: Callable[..., object], *arguments: Any) -> None:
        """A turn: a call, and the hand-out of the slots that it has freed."""

        def turn() -> None:
            call(*arguments)
            while self.host.memory.movements.serve():
                pass

        messages = sent(self.host.run(turn))
        self.sent += messages
        self.open += [one for one in messages if isinstance(one, Copy | ProbeStore | Read | Write)]

    def complete(self, number: int = 0, failed: Sequence[int] = ()) -> None:
        """Complete an open request. failed: indices of blocks that do not move. For a probe, any
        index means that it fails."""
        message = self.open.pop(number)
        completion: Any
        if isinstance(message, Copy):
            for i, (block, slot) in enumerate(zip(message.blocks, message.slots, strict=True)):
                if i in failed:
                    continue
                if message.direction is Direction.TO_HOST:
                    self.slots[slot] = self.device[block]
                else:
                    self.device[block] = self.slots[slot]
            completion = Copied(message.op, tuple(i for i in failed if i < len(message.blocks)))
        elif isinstance(message, ProbeStore):
            hashes = split_hashes(message.keys)
            run = next((i for i, one in enumerate(hashes) if one not in self.store), len(hashes))
            completion = Probed(message.op, 0 if failed else run)
        else:
            outcomes = bytearray()
            for i, one in enumerate(split_hashes(message.keys)):
                if isinstance(message, Write):
                    assert self.slots[message.slots[i]] == one, "another block's bytes are written"
                    outcomes.append(Outcome.NO_SPACE if i in failed else Outcome.OK)
                    self.store |= set() if i in failed else {one}
                else:
                    good = one in self.store and i not in failed
                    outcomes.append(Outcome.OK if good else Outcome.MISS)
                    if good:
                        self.slots[message.slots[i]] = one
            kind = Written if isinstance(message, Write) else ReadDone
            completion = kind(message.op, bytes(outcomes))
        self.run(self.host.memory.completed, completion)

    def complete_all(self) -> None:
        """Complete every request, oldest first, until none is open."""
        while self.open:
            self.complete()

    def of(self, *kinds: type) -> list[Any]:
        """The messages sent of these types."""
        return [one for one in self.sent if isinstance(one, kinds)]

    def sent_before(self, message: Message, kind: type) -> list[Any]:
        """The messages of a type sent before another message."""
        return [one for one in self.sent[: self.sent.index(message)] if isinstance(one, kind)]
