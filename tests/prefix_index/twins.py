"""Two PrefixIndex actors that get the same messages. One tries to answer each ask in one step
first, the other has its handlers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np

from kvactors.actor import Ask, Message, PeerRestarted
from kvactors.cpu_evictor.messages import (
    Cancel,
    HostBlocksAdded,
    HostBlocksRemoved,
    Load,
    Loaded,
    LoadStalled,
    Offload,
    Offloaded,
    Save,
    Saved,
    SetTargets,
)
from kvactors.gpu_swapper.messages import CopiedWithin, CopyWithin, DataPlaneStatus
from kvactors.hints import Hints
from kvactors.identity import PLAIN, RequestScope
from kvactors.native import BlockTree, Path, StepTokens
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import (
    Abandon,
    Acquire,
    ChangeShares,
    Clear,
    Commit,
    Continue,
    Extend,
    Finish,
    Fork,
    Pause,
    Preempt,
    Prefetch,
    Proceed,
    Ready,
    Reserve,
    Resume,
    SetNamespace,
    SetQuota,
    StepLeases,
    Stored,
    Sweep,
    Truncate,
    Unpin,
    Withdrawn,
)
from kvactors.prefix_index.policy import TierPolicies, policies_of
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.settings import IndexSettings
from kvactors.prefix_index.statistics import statistics_of
from kvactors.quotas import Quota
from kvactors.types import split_hashes
from tests.support.probe import Probe
from tests.support.stepper import Answered, Effects, Stepper, Timer

BLOCK = 2
LONGEST = 6
SCOPES = [PLAIN, RequestScope(salt="s"), RequestScope(salt="t"), RequestScope(lora="l", lora_id=3)]
HINTS = [
    Hints(priority=1),
    Hints(priority=-1, ttl=3.0),
    Hints(pin=True),
    Hints(session_ends=True),
    Hints(returns_in=2.0),
]


def answered_at_once(stepper: Stepper[PrefixIndex], message: Message) -> Effects | None:
    """The effects of an ask that the actor answers in one step, None if it needs its handler."""
    answerer = stepper.actor.answerers.get(type(message))
    if answerer is None:
        return None
    with stepper._inside():
        reply = answerer(message)
        found = stepper._effects()
    assert found == Effects(), "an answer in one step has an effect"
    return None if reply is None else Effects(answered=(Answered(message, reply, None),))


def plain(value: Any) -> Any:
    """A value as plain data, which can be compared."""
    if isinstance(value, Path):
        return path_state(value)
    if isinstance(value, BaseException):
        return type(value).__name__, str(value)
    if isinstance(value, Continue):
        return "Continue"
    if isinstance(value, msgspec.Struct):
        fields = [(name, plain(getattr(value, name))) for name in value.__struct_fields__]
        return type(value).__name__, fields
    if isinstance(value, (memoryview, np.ndarray)):
        return value.tolist()
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return value


def path_state(path: Path) -> Any:
    """All that can be read of a path without making block hashes."""
    return (
        path.root,
        path.tokens(0, path.num_full_blocks),
        path.num_tokens,
        path.num_held,
        path.num_committed,
        path.blocks(),
        [path.is_shared(position) for position in range(path.num_blocks)],
        path.salt,
    )


def tree_state(tree: BlockTree) -> Any:
    """Counts of a tree, its resident blocks, and the state of its policies."""
    counts = tree.statistics()
    del counts["bytes"]
    retention = tree.retention(), tree.retention(True)
    owners = tree.owners() if tree.sharing else None
    return counts, sorted(split_hashes(tree.device_hashes())), retention, owners, tree.pinned


def state_of(actor: PrefixIndex) -> Any:
    """The state of an index that a message can depend on."""
    core = actor.core
    index, leases = core.index, core.leases
    rows = index.policy.quotas.counts.rows
    return {
        "statistics": statistics_of(core),
        "tree": tree_state(index.tree),
        "retired": [tree_state(tree) for tree in index.retired],
        "free": index.pool.free_blocks(),
        "owners": dict(index.pool._owners),
        "reserved": index.reserved,
        "leases": [
            (
                lease.id,
                lease.request_id,
                path_state(lease.path),
                lease.tree is index.tree,
                lease.deadline,
                lease.media,
                (lease.device_hits, lease.host_hits, lease.storage_hits, lease.expected_blocks),
                (lease.granted, lease.counted, lease.prompt_tokens, lease.output_tokens),
                plain(lease.fault),
                lease.hints,
                lease.pin_prompt,
                [load.op for load in lease.loads],
                len(lease.ready),
            )
            for lease in leases
        ],
        "preempted": list(leases._preempted),
        "scopes": list(core.announcements.scopes.items()),
        "salts": [
            (number, [getattr(row, name) for name in type(row).__slots__])
            for number, row in rows.items()
        ],
        "waiting": list(core.admission.waiting),
        "room": list(core.admission.space.requests),
        "held": list(core.held.requests),
        "promised": core.admission.blocks_promised,
        "closing": core.admission.closing,
    }


class Twin:
    """One of the two. at_once: it tries to answer an ask in one step first."""

    def __init__(self, seed: int, *, at_once: bool) -> None:
        random = Random(seed)
        self.at_once, self.incarnation = at_once, 0
        self.roots = Roots("model", "a", bytes(32))
        self.host = random.random() < 0.35
        self.fetch = random.random() < 0.3
        exclusive = not self.host or random.random() < 0.5
        self.policy = policies_of(
            random.choice(["lru", "retain"]),
            random.choice(["lru", "retain"]) if self.host else "lru",
            lambda: self.stepper.now,
        )
        if self.policy.tables is not None:
            self.policy = TierPolicies(
                type(self.policy.tables)(first=2),
                self.policy.now,
                device=self.policy._device,
                host=self.policy.host,
            )
        self.blocks, self.recompute = random.randint(1, 9), random.random() < 0.5
        self.part = random.choice([1, 2, 100, 100])
        low = random.choice([0, 0, 1, 2])
        save = random.choice(["none", "write_through", "write_through_selective"])
        self.settings = IndexSettings(
            exclusive=exclusive,
            host_tier=self.host,
            fetch=self.fetch,
            announce=random.random() < 0.3,
            announce_whole=random.random() < 0.5,
            free_low=low,
            free_high=low + random.randint(0, 2) if low else 0,
            save=save if self.fetch else "none",  # type: ignore[arg-type]
            min_hits=2,
        )
        self.loads: dict[int, Load] = {}
        self.offloads: dict[int, Offload] = {}
        self.saves: dict[int, Save] = {}
        self.copies: dict[int, CopyWithin] = {}
        self.works: list[Message] = []
        self.begin()

    def begin(self) -> None:
        """The next incarnation."""
        index = BlockIndex(
            BLOCK,
            self.blocks,
            64,
            recompute_last_token=self.recompute,
            policy=self.policy,
            hashes=self.settings.announce or self.host or self.fetch,
        )
        index.part = self.part

        def make(ref: Any) -> PrefixIndex:
            return PrefixIndex(
                ref,
                index=index,
                evictor=Probe("cpu_evictor"),
                swapper=Probe("gpu_swapper"),
                notifier=Probe("flush_notifier"),
                roots=self.roots,
                settings=self.settings,
            )

        self.stepper = Stepper(make, incarnation=self.incarnation)
        for waiting in (self.loads, self.offloads, self.saves, self.copies, self.works):
            waiting.clear()
        self.incarnation += 1

    def turn(self, message: Message, deadline: float | None) -> tuple[Effects, bool]:
        """The effects of a message, and whether it was answered in one step. Only an ask of an
        actor without a message in its channel can be."""
        effects = None
        if self.at_once and isinstance(message, Ask) and not self.works:
            effects = answered_at_once(self.stepper, message)
        one_step = effects is not None
        if effects is None:
            effects = self.stepper.turn(message, deadline=deadline)
        self.note(effects)
        return effects, one_step

    def note(self, effects: Effects) -> None:
        """Keep what other actors, and later turns, have to do."""
        for message in [told.message for told in effects.told]:
            if isinstance(message, Load):
                self.loads[message.op] = message
            elif isinstance(message, SetTargets) and message.op in self.loads:
                load = self.loads[message.op]
                self.loads[message.op] = msgspec.structs.replace(load, blocks=message.blocks)
            elif isinstance(message, Cancel):
                self.loads.pop(message.op, None)
            elif isinstance(message, Offload):
                self.offloads[message.op] = message
            elif isinstance(message, Save):
                self.saves[message.op] = message
            elif isinstance(message, CopyWithin):
                self.copies[message.op] = message
            elif isinstance(message, (Continue, Proceed, Sweep)):
                self.works.append(message)


class Twins:
    """A seeded walk of both. `reached` counts the asks answered in one step, and those that were
    not, by type."""

    def __init__(self, seed: int, reached: Counter[str]) -> None:
        self.random, self.reached = Random(f"walk {seed}"), reached
        self.twins = [Twin(seed, at_once=at_once) for at_once in (True, False)]
        self.first = self.twins[0]
        self.leases: dict[int, int] = {}  # number -> tokens
        self.open: dict[int, int] = {}
        self.number = self.memory_generation = 0
        self.trace: list[str] = []

    def both(self, make: Callable[[Twin], Message], *, patience: float | None = 1.0) -> Effects:
        """Give both the same message, each its own object of it, and compare what comes of it."""
        deadline = None if patience is None else self.first.stepper.now + patience
        found = []
        for twin in self.twins:
            message = make(twin)
            effects, one_step = twin.turn(message, deadline)
            found.append(effects)
            if twin.at_once:
                kind = type(message).__name__
                self.trace.append(f"{kind} {'at once' if one_step else 'by its handler'}")
                self.reached[f"{kind} {'at once' if one_step else 'by its handler'}"] += 1
        self.take(found[0])
        ours, others = ([self.shown(one) for one in effects] for effects in found)
        assert ours == others, f"{ours} is not {others}"
        self.compare()
        return found[0]

    def shown(self, part: Any) -> Any:
        if not isinstance(part, tuple):
            return part
        return [self.shown_one(one) for one in part]

    def shown_one(self, one: Any) -> Any:
        if isinstance(one, Timer):
            return one.when, plain(one.message), one.handle.cancelled()
        if isinstance(one, Answered):
            kind, lease = type(one.message).__name__, getattr(one.message, "lease", 0)
            return kind, lease, plain(one.value), plain(one.error)
        return plain(one)

    def compare(self) -> None:
        """Both have the same state, and each is consistent."""
        states = [state_of(twin.stepper.actor) for twin in self.twins]
        for name, value in states[0].items():
            assert value == states[1][name], f"{name}: {value} is not {states[1][name]}"
        for twin in self.twins:
            twin.stepper.actor.check()
            twin.stepper.actor.index.check()

    def take(self, effects: Effects) -> None:
        """Follow the leases."""
        for message, value, error in effects.answered:
            if isinstance(message, Acquire):
                tokens = self.open.pop(message.lease, 0)
                if error is None:
                    self.leases[message.lease] = tokens
            elif isinstance(message, (Finish, Preempt)) and error is None:
                self.leases.pop(message.lease, None)
            elif isinstance(message, Extend) and error is None and message.lease in self.leases:
                self.leases[message.lease] += message.added.num_tokens
            elif isinstance(message, Truncate) and error is None:
                self.leases[message.lease] = message.num_tokens
            elif isinstance(message, Fork) and error is None:
                self.leases.update(dict.fromkeys(message.leases, message.position))
            elif isinstance(message, StepLeases) and error is None:
                for row, (lease, done) in enumerate(
                    zip(message.leases, value.committed, strict=True)
                ):
                    if done >= 0 and lease in self.leases:
                        self.leases[lease] += message.tokens.counts[row]

    # -- moves

    def path(self, twin: Twin, tokens: list[int], scope: RequestScope, *, stale: bool) -> Path:
        path = Path(BLOCK, bytes(32) if stale else twin.roots.root(scope))
        path.extend(tokens)
        return path

    def acquire(self) -> None:
        if len(self.leases) + len(self.open) > 5:
            self.end()
            return
        random = self.random
        self.number += 1
        family, count = random.choice([0, 0, 0, 1]), random.randint(1, LONGEST * BLOCK)
        if random.random() < 0.5:
            count -= count % BLOCK
        count = max(1, count)
        tokens = [family * 100 + position for position in range(count)]
        scope = random.choice(SCOPES) if random.random() < 0.3 else PLAIN
        stale = random.random() < 0.1
        media = ((1, 3),) if random.random() < 0.08 and count > 4 else ()
        chunk = random.choice([1, BLOCK + 1]) if random.random() < 0.08 else 0
        stored = random.choice([0, 1, LONGEST]) if random.random() < 0.3 else None
        hints = random.choice(HINTS) if random.random() < 0.1 else None
        request = f"r{random.choice([self.number, 1, 2])}"
        wait, room = random.random() < 0.7, random.random() < 0.2
        number, deadline = self.number, self.first.stepper.now + 1.0
        self.open[number] = count

        def message(twin: Twin) -> Acquire:
            path = self.path(twin, tokens, scope, stale=stale)
            counted = None if stored is None else Stored(path.root, stored)
            return Acquire(
                number,
                request,
                path,
                deadline,
                wait,
                scope,
                media,
                room,
                chunk,
                counted,
                hints,
            )

        self.both(message)

    def any_lease(self) -> int:
        if not self.leases or self.random.random() < 0.02:
            return self.random.randint(1, self.number + 1)  # perhaps one that has ended
        return self.random.choice(sorted(self.leases))

    def commit(self) -> None:
        lease = self.any_lease()
        tokens = self.leases.get(lease, 0)
        computed: Any = tokens - self.random.choice([0, 0, 1, 2, 3])
        if self.random.random() < 0.06:
            computed = self.random.choice([-1, tokens + 1, 2**62, True, 1.0, None])
        self.both(lambda _: Commit(lease, computed))

    def finish(self) -> None:
        lease, random = self.any_lease(), self.random
        tokens = self.leases.get(lease, 0)
        computed: Any = random.choice([None, tokens, tokens - 1, tokens])
        if random.random() < 0.05:
            computed = random.choice([-1, tokens + 1, True])
        output = random.choice([None, None, 0, 3, 2**40])
        hints = random.choice(HINTS) if random.random() < 0.05 else None
        self.both(lambda _: Finish(lease, computed, output, hints))

    def preempt(self) -> None:
        lease = self.any_lease()
        computed = self.random.choice([0, self.leases.get(lease, 0)])
        self.both(lambda _: Preempt(lease, computed))

    def abandon(self) -> None:
        everything = sorted([*self.leases, *self.open])
        if not everything:
            return
        lease = self.random.choice(everything)
        for twin in self.twins:
            for envelope in list(twin.stepper._open):
                if isinstance(envelope.message, Acquire) and envelope.message.lease == lease:
                    twin.stepper.withdraw(envelope.message)
        self.open.pop(lease, None)
        self.leases.pop(lease, None)
        self.both(lambda _: Abandon(lease))

    def end(self) -> None:
        self.random.choice([self.finish, self.finish, self.finish, self.preempt, self.abandon])()

    def added(self, count: int) -> Path:
        path = Path(BLOCK, bytes(32))
        path.extend(list(range(count)))
        return path

    def grow(self) -> None:
        lease, count = self.any_lease(), self.random.randint(1, BLOCK + 1)
        at, kind = self.leases.get(lease, 0), self.random.randrange(4)
        if kind == 0:
            self.both(lambda _: Reserve(lease, at, at + count))
        elif kind == 1:
            tokens = StepTokens([list(range(count))])
            self.both(lambda _: StepLeases(0, [lease], tokens, [at], [at]))
        else:
            self.both(lambda _: Extend(lease, at, self.added(count)))

    def truncate(self) -> None:
        lease = self.any_lease()
        at = self.leases.get(lease, 0)
        less = self.random.randint(0, 3)
        self.both(lambda _: Truncate(lease, at, max(0, at - less)))

    def fork(self) -> None:
        if len(self.leases) + len(self.open) > 6:
            return
        lease, numbers = self.any_lease(), (self.number + 1,)
        self.number += 1
        at, deadline = self.leases.get(lease, 0), self.first.stepper.now + 1.0
        room = self.random.random() < 0.3
        names = (f"r{self.number}",)
        self.both(lambda _: Fork(lease, at, numbers, names, deadline, True, room))

    def withdraw(self) -> None:
        lease = self.any_lease()
        for twin in self.twins:
            for envelope in list(twin.stepper._open):
                message = envelope.message
                if isinstance(message, (Extend, Reserve, Fork)) and message.lease == lease:
                    twin.stepper.withdraw(message)
        self.both(lambda _: Withdrawn(lease))

    def wait_ready(self) -> None:
        lease = self.any_lease()
        self.both(lambda _: Ready(lease))

    def whole(self) -> None:
        """A call about the whole cache."""
        random = self.random
        salt = random.choice(["s", "t"])
        kind = random.randrange(9)
        if kind == 0:
            self.both(lambda _: Clear())
        elif kind == 1:
            self.both(lambda _: Clear(salt=salt))
        elif kind == 2:
            namespace = random.choice(["a", "b"])
            self.both(lambda _: SetNamespace(namespace))
        elif kind == 3:
            self.both(lambda _: Pause())
        elif kind == 4:
            self.both(lambda _: Pause(asleep=True))
        elif kind == 5 and random.random() < 0.5:
            quota = random.choice([None, Quota(device=random.randint(0, 3))])
            self.both(lambda _: ChangeShares(SetQuota(salt, quota)))
        elif kind == 6:
            tokens = list(range(random.randint(1, LONGEST) * BLOCK))
            self.both(
                lambda twin: ChangeShares(Unpin(self.path(twin, tokens, PLAIN, stale=False), PLAIN))
            )
        elif kind == 7:
            tokens, deadline = list(range(LONGEST * BLOCK)), self.first.stepper.now + 1.0
            self.both(
                lambda twin: Prefetch(self.path(twin, tokens, PLAIN, stale=False), deadline, PLAIN)
            )

    def resume(self) -> None:
        held = self.first.stepper.actor.core.held
        if held.paused or held.asleep:
            asleep = held.asleep
            self.both(lambda _: Resume(awake=asleep))

    def complete(self) -> None:
        """Another actor has done what it was asked for."""
        twin, random = self.first, self.random
        kinds = [one for one in (twin.loads, twin.offloads, twin.saves, twin.copies) if one]
        if not kinds:
            return
        kept = random.randrange(256)
        chosen: Any = random.choice(kinds)
        op = random.choice(sorted(chosen))
        message = chosen[op]
        if isinstance(message, Load):
            if not message.blocks:
                return
            if random.random() < 0.1:
                self.both(lambda _: LoadStalled(op))
                return
            good = random.randint(0, len(message.blocks))
            result: Message = Loaded(op, good, random.randint(0, good))
        elif isinstance(message, CopyWithin):
            result = CopiedWithin(op, () if kept % 4 else (0,))
        else:
            mask = bytes(kept >> j % 8 & 1 for j in range(len(message.blocks)))
            is_offload = isinstance(message, Offload)
            result = Offloaded(op, mask) if is_offload else Saved(op, mask)
        for one in self.twins:
            for waiting in (one.loads, one.offloads, one.saves, one.copies):
                if op in waiting:
                    del waiting[op]  # type: ignore[attr-defined]
        self.both(lambda _: result)

    def work(self) -> None:
        """The next turn of work in parts."""
        if not self.first.works:
            return
        which = self.random.randrange(len(self.first.works))
        works = {id(twin): twin.works.pop(which) for twin in self.twins}
        self.both(lambda twin: works[id(twin)])

    def host_hint(self) -> None:
        if not self.first.host:
            return
        path = self.path(self.first, list(range(LONGEST * BLOCK)), PLAIN, stale=False)
        hashes = path.hashes(self.random.randint(0, 2), LONGEST)
        core, gained = self.first.stepper.actor.core, self.random.random() < 0.5
        self.both(
            lambda _: (
                HostBlocksAdded(hashes, core.clears.sent, core.index.memory_generation)
                if gained
                else HostBlocksRemoved(hashes)
            )
        )

    def elapse(self) -> None:
        seconds = self.random.choice([0.01, 0.3, 2.5])
        found = []
        for twin in self.twins:
            effects = twin.stepper.elapse(seconds)
            twin.note(effects)
            found.append(effects)
        self.take(found[0])
        ours, others = ([self.shown(one) for one in effects] for effects in found)
        assert ours == others
        self.compare()

    def accident(self) -> None:
        kind = self.random.randrange(8)
        if kind == 0:
            self.memory_generation += 1
            self.both(lambda _: DataPlaneStatus(True, True, self.memory_generation))
        elif kind == 1:
            self.both(lambda _: DataPlaneStatus(False, False, self.memory_generation))
        elif kind == 2:
            self.number += 1
            for twin in self.twins:
                for waiting in (twin.loads, twin.offloads, twin.saves):
                    waiting.clear()  # type: ignore[attr-defined]
            self.both(lambda _: PeerRestarted("cpu_evictor", self.number))
            for twin in self.twins:
                twin.copies.clear()
            self.both(lambda _: PeerRestarted("gpu_swapper", self.number))
        elif kind == 3:
            self.number += 1
            self.both(lambda _: PeerRestarted("flush_notifier", self.number))
        elif kind == 4:
            self.leases.clear()
            self.open.clear()
            for twin in self.twins:
                twin.begin()
                twin.note(twin.stepper.started)
            self.compare()

    def run(self, steps: int) -> None:
        """So many moves."""
        moves = {
            self.acquire: 30,
            self.commit: 24,
            self.finish: 14,
            self.end: 4,
            self.grow: 8,
            self.truncate: 2,
            self.fork: 2,
            self.withdraw: 1,
            self.wait_ready: 1,
            self.whole: 3,
            self.resume: 4,
            self.complete: 18,
            self.work: 20,
            self.host_hint: 1,
            self.elapse: 5,
            self.accident: 1,
        }
        choices, weights = list(moves), list(moves.values())
        for _ in range(steps):
            move = self.random.choices(choices, weights)[0]
            self.trace.append(move.__name__)
            move()
