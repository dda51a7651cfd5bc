"""PrefixIndex and its objects without a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from kvactors.actor import Control, Envelope, Message
from kvactors.identity import PLAIN
from kvactors.native import Path
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.leases import LeaseState, LeaseTable
from kvactors.prefix_index.messages import Acquire
from kvactors.prefix_index.settings import IndexSettings, Roots, TierPolicies
from kvactors.prefix_index.tree import BlockIndex
from kvactors.prefix_index.work import IndexEffects, Timed
from tests.support.effects import Recording, Started, answers, messages, receiver

__all__ = ["answers", "messages"]

BLOCK = 2


class ReplyPort:
    """Stands in for the future of a request."""

    def __init__(self) -> None:
        self.cancelled = False

    def done(self) -> bool:
        return self.cancelled


class Request(Envelope[Any]):
    """A request without a loop. `cancel` stands for its caller."""

    message: Message = msgspec.field(default_factory=Message)
    reply: Any = msgspec.field(default_factory=ReplyPort)
    deadline: float | None = None
    incarnation: int = 0

    def cancel(self) -> None:
        self.reply.cancelled = True


class StartTimer(NamedTuple):
    """A timer of an operation was started."""

    operation: Timed
    deadline: float
    message: Control
    grace: float


class RecordedIndexEffects(Recording, IndexEffects):
    """Effects as a list, and timers by their deadlines: there is no clock."""

    def __init__(self) -> None:
        super().__init__()
        self._evictor = self._swapper = self._notifier = None  # type: ignore[assignment]
        self.works = 0

    def at(
        self, operation: Timed, deadline: float, message: Control, *, grace: float = 0.0
    ) -> None:
        self._add(StartTimer(operation, deadline, message, grace))
        operation.timer = Started(deadline, message)  # type: ignore[assignment]


def effects_of(method: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """The effects of a call of a method of one of the objects."""
    owner: Any = method.__self__  # type: ignore[attr-defined]
    out = owner.out if isinstance(owner, PrefixIndex) else owner._out
    out.take()
    method(*arguments, **options)
    return out.take()


def work_of(out: Any, work: Any) -> list[Any]:
    """The effects of the next slice of some work."""
    out.take()
    out.begin(work)
    return out.take()


def block_index(
    blocks: int = 8, *, part: int = 100, policy: TierPolicies | None = None
) -> BlockIndex:
    """An empty device."""
    index = BlockIndex(BLOCK, blocks, 64, recompute_last_token=False, policy=policy)
    index.turn_blocks = part
    return index


def core(
    blocks: int = 8,
    *,
    part: int = 100,
    namespace: str = "a",
    policy: TierPolicies | None = None,
    **settings: Any,
) -> PrefixIndex:
    """The actor. An exclusive host tier and no store are the defaults."""
    chosen = {"exclusive": True, "host_tier": True, "announce": True, **settings}
    index = block_index(blocks, part=part, policy=policy)
    return _actor(index, Roots("model", namespace, bytes(32)), IndexSettings(**chosen))


def _actor(
    index: BlockIndex, roots: Roots, settings: IndexSettings, incarnation: int = 0
) -> PrefixIndex:
    ref = receiver("prefix_index")
    ref.incarnation = incarnation
    with (
        patch("kvactors.actor.actor.MailboxLoop"),
        patch("kvactors.prefix_index.actor.IndexEffects", lambda *_: RecordedIndexEffects()),
    ):
        return PrefixIndex(
            ref,
            index=index,
            evictor=receiver("cpu_evictor"),
            swapper=receiver("gpu_swapper"),
            notifier=receiver("flush_notifier"),
            roots=roots,
            settings=settings,
        )


def lease_table(index: BlockIndex, *, restarted: bool = False) -> LeaseTable:
    """The leases of a first incarnation, without a host tier and a sink."""
    settings = IndexSettings(exclusive=True, host_tier=False)
    return _actor(index, Roots("model", "a", bytes(32)), settings, int(restarted)).leases


def path(blocks: int, *, first: int = 0, root: bytes | None = None) -> Path:
    """A path of full blocks. Equal `first` means equal tokens."""
    made = Path(BLOCK, root or bytes(32))
    made.extend(list(range(first, first + blocks * BLOCK)))
    return made


def new_lease(index: BlockIndex, number: int, blocks: int, *, first: int = 0) -> LeaseState:
    """A lease whose path has matched nothing and has blocks to compute into."""
    made = path(blocks, first=first)
    index.tree.pin(made)
    made.assign(0, index.take(blocks))
    return LeaseState(number, f"r{number}", made, index.tree, 10.0)


def cache(state: PrefixIndex, blocks: int, *, first: int = 0) -> Path:
    """Compute and release so many blocks: they are cached on the device, and evictable."""
    made = path(blocks, first=first, root=state.roots.root(PLAIN))
    state.index.tree.pin(made)
    held = made.num_committed
    made.assign(held, state.index.take(blocks - held))
    state.index.tree.commit(made, blocks)
    state.index.pool.give(state.index.tree.release(made))
    return made


def acquire(
    lease: int, blocks: int, *, first: int = 0, deadline: float = 10.0, **options: Any
) -> Acquire:
    """A request of full blocks."""
    return Acquire(lease, f"r{lease}", path(blocks, first=first), deadline, **options)
