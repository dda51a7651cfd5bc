"""The objects of PrefixIndex without the actor and without a loop."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec

from kvactors.actor import Envelope, Message
from kvactors.identity import PLAIN
from kvactors.native import Path
from kvactors.prefix_index.actions import Action, Refusal, Reply
from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.core import IndexCore
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.host_victims import HostVictims
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.lineages import LineageSource
from kvactors.prefix_index.messages import Acquire
from kvactors.prefix_index.policy import TierPolicies
from kvactors.prefix_index.records import LeaseState
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.settings import IndexSettings

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


def block_index(
    blocks: int = 8, *, part: int = 100, policy: TierPolicies | None = None
) -> BlockIndex:
    """An empty device."""
    index = BlockIndex(BLOCK, blocks, 64, recompute_last_token=False, policy=policy)
    index.part = part
    return index


def core(
    blocks: int = 8,
    *,
    part: int = 100,
    namespace: str = "a",
    policy: TierPolicies | None = None,
    **settings: Any,
) -> IndexCore:
    """All objects, wired. An exclusive host tier and no store are the defaults."""
    roots = Roots("model", namespace, bytes(32))
    chosen = {"exclusive": True, "host_tier": True, "announce": True, **settings}
    return IndexCore(
        block_index(blocks, part=part, policy=policy),
        roots,
        IndexSettings(**chosen),
        restarted=False,
    )


def evictions(index: BlockIndex, *, offload: bool = False, announce: bool = False) -> Evictions:
    """Evictions without lineages."""
    announcements = Announcements(index, enabled=announce, whole=False)
    lineages = LineageSource(False, {}, lambda _: b"")
    victims = HostVictims(index, IndexSettings(exclusive=True, host_tier=True))
    return Evictions(index, announcements, lineages, count(1), victims, offload=offload)


def lease_table(index: BlockIndex) -> LeaseTable:
    """The leases of a first incarnation."""
    return LeaseTable(index, evictions(index), restarted=False)


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


def cache(state: IndexCore, blocks: int, *, first: int = 0) -> Path:
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


def answers(actions: list[Action]) -> list[Any]:
    """The values and errors that requests are answered with, in order."""
    return [
        action.value if isinstance(action, Reply) else action.error
        for action in actions
        if isinstance(action, (Reply, Refusal))
    ]


def messages(actions: list[Action]) -> list[Message]:
    """The messages among actions, in order."""
    return [action for action in actions if isinstance(action, Message)]
