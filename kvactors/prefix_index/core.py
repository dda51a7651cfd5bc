"""The state of PrefixIndex: the objects that decide, wired to each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, count

from kvactors.actor import Envelope
from kvactors.cpu_evictor.messages import HostBlocksAdded, HostBlocksRemoved
from kvactors.errors import CacheAsleep, RankLost, ensure
from kvactors.gpu_swapper.messages import DataPlaneStatus
from kvactors.identity import PLAIN
from kvactors.native import BlockTree
from kvactors.prefix_index.actions import Action, Refusal, Reply, Work
from kvactors.prefix_index.admission import Admission
from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.at_once import AtOnce
from kvactors.prefix_index.clears import Clears
from kvactors.prefix_index.commits import Commits
from kvactors.prefix_index.endings import Endings
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.forks import Forks
from kvactors.prefix_index.grants import Grants
from kvactors.prefix_index.held import HeldRequests
from kvactors.prefix_index.host_victims import HostVictims
from kvactors.prefix_index.index import BlockIndex, set_num_blocks
from kvactors.prefix_index.leases import LeaseTable, check_leases
from kvactors.prefix_index.lineages import LineageSource
from kvactors.prefix_index.loads import LoadTable
from kvactors.prefix_index.long_requests import LongRequests
from kvactors.prefix_index.messages import (
    Abandon,
    Ack,
    AdmissionDeadline,
    ChangeShares,
    Clear,
    Commit,
    PinExpired,
    SetNumBlocks,
    Unpin,
    Withdrawn,
)
from kvactors.prefix_index.parts import hash_first, next_part
from kvactors.prefix_index.pins import Pins
from kvactors.prefix_index.records import IndexStatistics
from kvactors.prefix_index.requests import Requests
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.saves import SaveTable
from kvactors.prefix_index.settings import IndexSettings
from kvactors.prefix_index.sleeping import Sleep
from kvactors.prefix_index.statistics import statistics_of
from kvactors.prefix_index.steps import Steps
from kvactors.prefix_index.tables import BlockTables
from kvactors.quotas import Quota, salt_id
from kvactors.types import Reason


class IndexCore:
    """Everything that one incarnation of PrefixIndex owns. Each object depends only on those made
    before it.

    Args:
        restarted: it is not the first incarnation.
    """

    def __init__(
        self, index: BlockIndex, roots: Roots, settings: IndexSettings, *, restarted: bool
    ) -> None:
        ops, tickets = count(1), count(1)
        self._restarted = restarted
        self.index = index
        self.roots = roots
        self.settings = settings
        self.held = HeldRequests(tickets)
        self.held.asleep = settings.asleep
        self.clears = Clears(ops)
        self.announcements = news = Announcements(
            index, enabled=settings.announce, whole=settings.announce_whole
        )
        lineages = LineageSource(settings.keep_lineages, news.scopes, roots.root)
        victims = HostVictims(index, settings)
        self.evictions = Evictions(index, news, lineages, ops, victims, offload=settings.offload)
        self.leases = LeaseTable(index, self.evictions, restarted=restarted)
        self.commits = Commits(index, self.leases, news, self.evictions)
        self.loads = LoadTable(
            index, self.leases, self.evictions, news, lineages, ops, victims, settings
        )
        self.saves = SaveTable(index, lineages, ops, victims, settings)
        self.pins = Pins(
            index, settings.pin_share, news.scopes, roots.root, host=settings.host_tier
        )
        self.admission = Admission(
            index,
            self.loads,
            self.evictions,
            self.saves,
            self.leases,
            self.pins,
            tickets,
            free_low=settings.free_low,
            free_high=settings.free_high,
        )
        self.endings = Endings(
            index,
            self.leases,
            self.loads,
            self.saves,
            news,
            self.commits,
            self.admission,
            self.pins,
        )
        self.grants = Grants(
            index,
            self.leases,
            self.loads,
            self.evictions,
            news,
            self.admission,
            self.endings,
            roots,
            settings,
        )
        self.tables = BlockTables(index, self.leases, self.admission)
        self.forks = Forks(index, self.leases, self.tables, self.admission, self.endings, ops)
        self.steps = Steps(index, self.leases, self.commits, self.admission, self.evictions)
        long = LongRequests(index, self.admission, self.grants, roots, settings)
        sleep = Sleep(
            index, self.held, self.leases, self.evictions, news, self.admission, self.pins
        )
        self.requests = Requests(
            index,
            self.held,
            self.admission,
            self.grants,
            long,
            lineages,
            victims,
            settings,
            sleep,
            self.forks,
        )

        self.at_once = AtOnce(
            index,
            self.held,
            self.leases,
            self.grants,
            self.admission,
            roots,
            settings,
            self.tables,
        )

    def commit(self, message: Commit, envelope: Envelope[Ack]) -> list[Action]:
        """Commit tokens of a lease. A waiting request that shares the blocks may fit now."""
        actions = self.commits.commit(message.lease, message.computed_tokens, envelope)
        return actions + self.admission.look_again()

    def set_namespace(self, namespace: str, envelope: Envelope[Ack]) -> list[Action]:
        """Admit requests under another namespace, those that wait included. Blocks of the previous
        one age out."""
        actions: list[Action] = []
        if namespace != self.roots.namespace:
            self.roots.namespace = namespace
            actions = self.announcements.namespace_changed(namespace)
        return [*actions, Reply(envelope, Ack())]

    def set_num_blocks(self, message: SetNumBlocks) -> None:
        """Take the device blocks of a cache that was opened without any."""
        if not self.index.pool.total:
            set_num_blocks(self.index, message.num_blocks)
            self.admission.free_low = message.free_low
            self.admission.free_high = message.free_high

    # -- completions

    def loaded(self, op: int, num_loaded: int, from_host: int) -> list[Action]:
        """A load is over."""
        return self._then_serve(self.loads.finish(op, num_loaded, from_host))

    def load_overdue(self, op: int) -> list[Action]:
        """A load is past its deadline, or is blocked on a rank that does not respond."""
        return self._then_serve(self.loads.overdue(op))

    def offloaded(self, op: int, on_host: bytes) -> list[Action]:
        """The copies of an eviction are complete."""
        return self._then_serve(self.evictions.finish(op, on_host))

    def saved(self, op: int, on_host: bytes) -> list[Action]:
        """Blocks of a finished request have been copied. After the last of them its path is
        released."""
        saved = self.saves.finish(op, on_host)
        if saved is None:
            return []
        release = self.admission.release(saved.tree, saved.path) if saved.answered() else []
        return self._then_serve(release)

    def _then_serve(self, actions: list[Action] | None) -> list[Action]:
        """After the end of an operation: serve the requests that wait. None: it is unknown."""
        return [] if actions is None else actions + self.admission.serve_waiting()

    def started(self) -> list[Action]:
        """The first turn. A restarted index has an empty device tier."""
        return self.announcements.cleared(Reason.RESTART) if self._restarted else []

    def host_blocks(self, message: HostBlocksAdded | HostBlocksRemoved) -> None:
        """Blocks left the host tier, or it has more. A hint of more blocks from before a clear or a
        loss is out of date."""
        if isinstance(message, HostBlocksRemoved):
            self.index.tree.host_blocks_removed(message.hashes)
        elif (
            message.clears == self.clears.sent
            and message.memory_generation == self.index.memory_generation
        ):
            self.index.tree.host_blocks_added(message.hashes)

    def data_plane_status(self, message: DataPlaneStatus) -> list[Action]:
        """Device memory was lost, or copies in flight may never complete."""
        if message.memory_lost:
            return self.device_lost(message.generation)
        return [] if message.available else self.admission.stall()

    def peer_restarted(self, name: str) -> list[Action]:
        """The host tier has lost its operations in flight, or a notifier its ledger."""
        if name == "cpu_evictor":
            return self.host_lost()
        if name == "gpu_swapper":
            return self.forks.swapper_lost()
        return self.announcements.announce_all() if name == "flush_notifier" else []

    # -- the whole cache

    def change_shares(self, message: ChangeShares, envelope: Envelope[Ack]) -> list[Action]:
        """Change a pin or a quota."""
        change = message.change
        if isinstance(change, Unpin):
            return self._unpin(change, envelope)
        return self._set_quota(change.salt, change.quota, envelope)

    def clear(self, message: Clear, envelope: Envelope[Ack]) -> list[Action]:
        """Continue with an empty tree, host tier and, on request, store, or without the blocks of a
        salt. Leases keep their blocks in the old tree until they end."""
        if self.held.asleep:
            return [Refusal(envelope, CacheAsleep())]
        if message.salt is not None:
            return self._clear_salt(message.salt, envelope, storage=message.storage)
        if message.lora is not None:
            return self._clear_lora(message.lora, envelope)
        actions = self.pins.end_all()
        freed = self.index.retire()
        actions += self.announcements.cleared(Reason.CLEAR)
        clear = self.clears.start(envelope, None, storage=message.storage)
        actions += [clear, *self.clears.device_cleared(clear.op, envelope, freed)]
        return actions + self.admission.serve_waiting()

    def _clear_salt(self, name: str, envelope: Envelope[Ack], *, storage: bool) -> list[Action]:
        """Forget the blocks of a salt. Leases keep theirs, which nothing else finds."""
        tree, salt = self.index.tree, salt_id(name)
        actions = self.pins.end_all(lambda pin: pin.salt == salt)
        self.index.policy.quotas.forget(name)
        tree.begin_forget(salt)
        used = [lease.path for lease in self.leases]
        used += self.loads.paths()
        used += [saved.path for saved in self.saves.paths()]
        for path in used:
            if path.salt == salt:
                path.forgotten = True
        clear = self.clears.start(envelope, salt, storage=storage)
        return [*actions, clear, *next_part(self._forget(tree, clear.op, envelope))]

    def _clear_lora(self, lora: str, envelope: Envelope[Ack]) -> list[Action]:
        """Let requests with an adapter start from another root hash. Blocks below the previous one
        age out, as after `set_namespace`."""
        scopes = self.announcements.scopes
        actions = self.pins.end_all(lambda pin: scopes.get(pin.root, PLAIN).lora == lora)
        self.roots.renew(lora)
        actions += self.announcements.namespace_changed(self.roots.namespace)
        return [*actions, Reply(envelope, Ack()), *self.admission.serve_waiting()]

    def _forget(self, tree: BlockTree, op: int, envelope: Envelope[Ack]) -> Work:
        """Free and report the blocks that are not found any more, a part of them a turn."""
        index, count, over = self.index, 0, False
        self.admission.closing += 1
        while True:
            over, freed, hashes = tree.forget_step(index.part, index.hashes)
            index.pool.give(freed)
            count += len(freed)
            actions = [] if tree.retired else self.announcements.removed(hashes, Reason.CLEAR)
            if over:
                break
            yield actions + self.admission.serve_waiting()
        self.admission.closing -= 1
        actions += self.clears.device_cleared(op, envelope, count)
        return actions + self.admission.serve_waiting()

    def _unpin(self, message: Unpin, envelope: Envelope[Ack]) -> list[Action]:
        """End the pin of a path."""
        self.grants.set_root(message.path, message.scope)
        end = partial(self._end_pin, message, envelope)
        return hash_first(message.path, self.index.part, end)

    def _end_pin(self, message: Unpin, envelope: Envelope[Ack]) -> list[Action]:
        if self.grants.set_root(message.path, message.scope):
            return self._unpin(message, envelope)  # the namespace has changed since
        blocks, actions = self.pins.unpin(message.path)
        return [*actions, Reply(envelope, Ack(blocks)), *self.admission.serve_waiting()]

    def expire(self, message: AdmissionDeadline | PinExpired) -> list[Action]:
        """The deadline of a wait, for blocks or for the end of a pause, or the end of a pin."""
        if isinstance(message, PinExpired):
            return self.pins.expire(message.number) + self.admission.serve_waiting()
        return self.requests.expire(message.lease, message.ticket)

    def abandon(self, message: Abandon | Withdrawn) -> list[Action]:
        """The holder of a lease, or the caller of a request that waits, has gone."""
        if isinstance(message, Withdrawn):
            return self.admission.withdraw(message.lease)
        actions = self.endings.abandon(message.lease)
        return actions + self.requests.cancel(message.lease)

    def _set_quota(self, salt: str, quota: Quota | None, envelope: Envelope[Ack]) -> list[Action]:
        """Change the quota of a salt, in both tiers."""
        changed = self.index.policy.set_quota(self.index.tree, salt, quota)
        return [changed, Reply(envelope, Ack())]

    def device_lost(self, memory_generation: int) -> list[Action]:
        """The blocks on the device may be lost: none of them can be hit any more, and no granted
        lease can be used."""
        self.index.memory_generation = memory_generation
        self.index.retire()
        self.pins.device_lost()
        actions = self.announcements.cleared(Reason.RESTART)
        actions += self.leases.fail_all(
            RankLost, "a rank was lost, and with it what this lease's blocks held there"
        )
        return actions + self.admission.stall()

    def host_lost(self) -> list[Action]:
        """The host tier and the swapper have restarted: no copy is in flight, interrupted copies
        have not arrived, and the host tier is empty."""
        actions = self.loads.host_lost()
        actions += self.evictions.host_lost()
        for saved in self.saves.host_lost():
            actions += self.admission.release(saved.tree, saved.path)
        self.index.tree.clear_host()
        actions += next_part(self._sweep_host(self.index.tree))
        self.clears.host_lost()
        actions += self.pins.again()
        actions += self.admission.serve_waiting()
        return actions + self.clears.again()

    def _sweep_host(self, tree: BlockTree) -> Work:
        """Remove the nodes of blocks that were on the host before its restart."""
        while not tree.sweep_host(self.index.part):
            yield []
        return []

    # -- inspection

    def in_use(self) -> bool:
        """Whether a lease, a request or an operation may hold device blocks."""
        holders = (self.leases, self.loads, self.evictions, self.saves, self.admission.waiting)
        return any(holders) or len(self.forks) > 0

    def check_steps(self, *, idle: bool) -> Iterator[None]:
        """Check every invariant, in steps of about a millisecond.

        Args:
            idle: no work has parts left.

        Raises:
            AssertionError, RuntimeError: names the inconsistency.
        """
        if idle and not self.in_use():
            tree = self.index.tree.statistics()
            used = tree["referenced"] - self.index.tree.pinned
            ensure(used == 0, f"{used} nodes referenced, no lease")
            used = self.index.pool.total - self.index.free
            ensure(used == tree["device"], f"{used} blocks in use, {tree['device']} in the tree")
            shared = self.index.pool.num_shared
            ensure(not shared, f"{shared} blocks with several owners, no lease")
        yield from chain(check_leases(self.leases), self.index.check_steps())

    def statistics(self) -> IndexStatistics:
        """A snapshot."""
        return statistics_of(self)
