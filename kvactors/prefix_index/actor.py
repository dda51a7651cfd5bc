"""PrefixIndex: finds cached prefixes of requests and gives requests device blocks.

Each handler calls the object that decides (`core.py`) and carries out the actions it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from kvactors.actor import Actor, ActorRef, Envelope, Message, PeerRestarted, on
from kvactors.actor.actor import Handler
from kvactors.cpu_evictor.messages import (
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
    HostRequest,
    LayersLoaded,
    Loaded,
    LoadStalled,
    Offloaded,
    Saved,
)
from kvactors.flush_notifier.messages import Report
from kvactors.gpu_swapper.messages import CopiedWithin, CopyWithin, DataPlaneStatus
from kvactors.prefix_index.core import IndexCore
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import (
    Abandon,
    Ack,
    Acquire,
    AcquireResult,
    AdmissionDeadline,
    ChangeShares,
    Clear,
    Commit,
    Continue,
    Extend,
    Finish,
    Fork,
    ForkResult,
    LayerReady,
    LayerResult,
    LoadDeadline,
    Pause,
    PinExpired,
    Preempt,
    Prefetch,
    Proceed,
    Ready,
    ReadyResult,
    Reserve,
    Resume,
    SetNamespace,
    SetNumBlocks,
    StepLeases,
    StepResult,
    Sweep,
    Truncate,
    Withdrawn,
)
from kvactors.prefix_index.parts import next_part
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.runner import SENDS, ActionRunner
from kvactors.prefix_index.settings import IndexSettings


class PrefixIndex(Actor):
    """Owns the block tree, the device blocks, their LRU order and the leases."""

    ROLE: ClassVar[str] = "prefix_index"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = SENDS

    def __init__(
        self,
        ref: ActorRef,
        *,
        index: BlockIndex,
        evictor: ActorRef[HostRequest],
        swapper: ActorRef[CopyWithin],
        notifier: ActorRef[Report],
        roots: Roots,
        settings: IndexSettings,
    ) -> None:
        super().__init__(ref)
        self.core = core = IndexCore(index, roots, settings, restarted=self.incarnation > 0)
        self.index = index
        self.runner = ActionRunner(self.context, evictor, swapper, notifier, core.at_once)
        self._perform, self._requests = self.runner.perform, core.requests  # bound: hot
        self.answerers = core.at_once.answerers
        for kind, answerer in self.answerers.items():
            self.handlers[kind] = self._at_once_first(answerer, self.handlers[kind])

    def _at_once_first(self, answerer: Callable[[Any], Any], handler: Handler) -> Handler:
        answer = self.answer

        def handle(message: Any, envelope: Envelope[Any]) -> None:
            found = answerer(message)
            if found is None:
                handler(message, envelope)
            else:
                answer(envelope, found)

        return handle

    def started(self) -> None:
        """A restarted index begins with an empty device tier."""
        self._perform(self.core.started())

    @on(Acquire)
    def acquire(self, message: Acquire, envelope: Envelope[AcquireResult]) -> None:
        """Give a request its device blocks, those of its cached prefix included."""
        self._perform(self._requests.acquire(message, envelope))

    @on(Prefetch)
    def prefetch(self, message: Prefetch, envelope: Envelope[Ack]) -> None:
        """Let the host tier fetch the blocks of an expected request."""
        self._perform(self._requests.prefetch(message, envelope))

    @on(Ready)
    def ready(self, message: Ready, envelope: Envelope[ReadyResult]) -> None:
        """Answer once the loads of a lease are over."""
        self._perform(self.core.leases.wait_ready(message.lease, envelope))

    @on(LayerReady)
    def layer_ready(self, message: LayerReady, envelope: Envelope[LayerResult]) -> None:
        """Answer once one layer of the loads of a lease has arrived."""
        self._perform(self.core.leases.wait_layer(message.lease, message.layer, envelope))

    @on(Extend)
    def extend(self, message: Extend, envelope: Envelope[AcquireResult]) -> None:
        """Append tokens to a lease."""
        self._perform(self.core.tables.grow(message, envelope))

    @on(Reserve)
    def reserve(self, message: Reserve, envelope: Envelope[AcquireResult]) -> None:
        """Give a lease device blocks ahead of tokens."""
        self._perform(self.core.tables.grow(message, envelope))

    @on(Fork)
    def fork(self, message: Fork, envelope: Envelope[ForkResult]) -> None:
        """Make further leases of the tokens of one."""
        self._perform(self.core.forks.fork(message, envelope))

    @on(CopiedWithin)
    def copied_within(self, message: CopiedWithin) -> None:
        """The copies for a fork have ended."""
        self._perform(self.core.forks.copied(message.op, message.failed))

    @on(Truncate)
    def truncate(self, message: Truncate, envelope: Envelope[Ack]) -> None:
        """Drop tokens of a lease, and reserved blocks."""
        self._perform(self.core.tables.truncate(message, envelope))

    @on(StepLeases)
    def step_leases(self, message: StepLeases, envelope: Envelope[StepResult]) -> None:
        """Extend and commit many leases."""
        self._perform(self.core.steps.step(message, envelope))

    @on(Commit)
    def commit(self, message: Commit, envelope: Envelope[Ack]) -> None:
        """Make the full blocks of computed tokens shareable."""
        self._perform(self.core.commit(message, envelope))

    @on(Finish)
    def finish(self, message: Finish, envelope: Envelope[Ack]) -> None:
        """End a lease: commit the computed blocks, announce and save by policy, release."""
        self._perform(self.core.endings.finish(message, envelope))

    @on(Preempt)
    def preempt(self, message: Preempt, envelope: Envelope[Ack]) -> None:
        """End a lease whose request will be acquired again."""
        self._perform(self.core.endings.preempt(message.lease, message.computed_tokens, envelope))

    @on(Abandon)
    @on(Withdrawn)
    def abandon(self, message: Abandon | Withdrawn) -> None:
        """The holder of a lease, or the caller of a request that waits, has gone."""
        self._perform(self.core.abandon(message))

    # -- the whole cache

    @on(Clear)
    def clear(self, message: Clear, envelope: Envelope[Ack]) -> None:
        """Empty the cache."""
        self._perform(self.core.clear(message, envelope))

    @on(ChangeShares)
    def change_shares(self, message: ChangeShares, envelope: Envelope[Ack]) -> None:
        """Change a pin or a quota."""
        self._perform(self.core.change_shares(message, envelope))

    @on(Pause)
    def pause(self, message: Pause, envelope: Envelope[Ack]) -> None:
        """Hold new requests, and answer once no transfer is in flight."""
        self._perform(self._requests.pause(message, envelope))

    @on(Resume)
    def resume(self, message: Resume, envelope: Envelope[Ack]) -> None:
        """Admit requests again."""
        self._perform(self._requests.resume(message, envelope))

    @on(SetNamespace)
    def set_namespace(self, message: SetNamespace, envelope: Envelope[Ack]) -> None:
        """Admit requests under another namespace."""
        self._perform(self.core.set_namespace(message.namespace, envelope))

    @on(SetNumBlocks)
    def set_num_blocks(self, message: SetNumBlocks) -> None:
        """Take the device blocks of a cache that was opened without any."""
        self.core.set_num_blocks(message)

    @on(Loaded)
    def loaded(self, message: Loaded) -> None:
        """A load is over."""
        self._perform(self.core.loaded(message.op, message.num_loaded, message.from_host))

    @on(LayersLoaded)
    def layers_loaded(self, message: LayersLoaded) -> None:
        """Some layers of a load have arrived."""
        self._perform(self.core.loads.layers_loaded(message.op, message.layers, message.blocks))

    @on(LoadDeadline)
    @on(LoadStalled)
    def load_overdue(self, message: LoadDeadline | LoadStalled) -> None:
        """A load is past its deadline, or is blocked on a rank that does not respond."""
        self._perform(self.core.load_overdue(message.op))

    @on(Offloaded)
    @on(Saved)
    def copied_to_host(self, message: Offloaded | Saved) -> None:
        """The copies of an eviction or of a finished request are complete."""
        done = self.core.offloaded if isinstance(message, Offloaded) else self.core.saved
        self._perform(done(message.op, message.kept_mask))

    @on(HostCleared)
    def host_cleared(self, message: HostCleared) -> None:
        """Host tier and store are empty, or the store could not be emptied."""
        self._perform(self.core.clears.finish(message))

    @on(HostBlocksRemoved)
    @on(HostBlocksAdded)
    def host_blocks(self, message: HostBlocksAdded | HostBlocksRemoved) -> None:
        """Blocks left the host tier, or it has more."""
        self.core.host_blocks(message)

    @on(DataPlaneStatus)
    def data_plane_status(self, message: DataPlaneStatus) -> None:
        """Device memory was lost, or copies in flight may never complete."""
        self._perform(self.core.data_plane_status(message))

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """The host tier has lost its operations in flight, or a notifier its ledger."""
        self._perform(self.core.peer_restarted(message.name))

    @on(AdmissionDeadline)
    @on(PinExpired)
    def deadline(self, message: AdmissionDeadline | PinExpired) -> None:
        """The deadline of a wait, for blocks or for the end of a pause, or the end of a pin."""
        self._perform(self.core.expire(message))

    @on(Proceed)
    @on(Sweep)
    def go_on(self, message: Proceed | Sweep) -> None:
        """The next turn's share of the queues, or of the work after a clear."""
        self._perform(self._requests.go_on(message))

    @on(Continue)
    def continue_work(self, message: Continue) -> None:
        """The next part of some work."""
        self.runner.works -= 1
        self._perform(next_part(message.work))

    def check(self) -> None:
        """See `IndexCore.check_steps`."""
        deque(self.check_steps(), maxlen=0)

    def check_steps(self) -> Iterator[None]:
        """See `IndexCore.check_steps`."""
        return self.core.check_steps(idle=not self.runner.works)
