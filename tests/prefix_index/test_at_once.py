"""A request that waits for nothing is answered in one step as its handler would answer it, or
nothing has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvactors.cpu_evictor.messages import Load, LoadStalled, Save
from kvactors.errors import LeaseEnded, RankLost
from kvactors.hints import Hints
from kvactors.identity import PLAIN, RequestScope
from kvactors.native import LifeTables, Path
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.held import Held
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import (
    Acquire,
    AcquireResult,
    ChangeShares,
    Clear,
    Commit,
    Extend,
    Finish,
    Fork,
    Pause,
    Reserve,
    Resume,
    SetNamespace,
    SetQuota,
)
from kvactors.prefix_index.policy import TierPolicies
from kvactors.prefix_index.roots import Roots
from kvactors.prefix_index.settings import IndexSettings
from kvactors.quotas import Quota, salt_id
from tests.prefix_index.objects import Request
from tests.prefix_index.twins import BLOCK, Twins, answered_at_once, state_of
from tests.support.probe import Probe
from tests.support.stepper import Stepper

WANTED = [
    f"{kind} {how}"
    for kind in ("Acquire", "Commit", "Finish")
    for how in ("at once", "by its handler")
]


class Index:
    """A stepped PrefixIndex, and requests to it."""

    def __init__(
        self, blocks: int = 8, *, recompute: bool = True, part: int = 100, **settings: Any
    ):
        self.roots = Roots("model", "a", bytes(32))
        chosen = {"exclusive": True, "host_tier": False, **settings}
        self.index = BlockIndex(BLOCK, blocks, 64, recompute_last_token=recompute)
        self.index.part = part
        self.number = 0
        self.stepper = Stepper(
            lambda ref: PrefixIndex(
                ref,
                index=self.index,
                evictor=Probe("cpu_evictor"),
                swapper=Probe("gpu_swapper"),
                notifier=Probe("flush_notifier"),
                roots=self.roots,
                settings=IndexSettings(**chosen),
            )
        )
        self.core = self.stepper.actor.core

    def request(self, tokens: int = 4, first: int = 0, **fields: Any) -> Acquire:
        self.number += 1
        scope = fields.get("scope", PLAIN)
        path = Path(BLOCK, self.roots.root(scope))
        path.extend(list(range(first, first + tokens)))
        return Acquire(self.number, f"r{self.number}", path, 100.0, **fields)

    def once(self, message: Any) -> Any:
        """The answer in one step. None, and nothing may have changed, if it needs its handler."""
        before = self.state()
        effects = answered_at_once(self.stepper, message)
        if effects is None:
            assert self.state() == before
            return None
        self.stepper.actor.check()
        return effects.answered[0].value

    def state(self) -> dict[str, Any]:
        """All but the recorded scopes of requests, which their handler records as well."""
        state: dict[str, Any] = state_of(self.stepper.actor)
        del state["scopes"], state["salts"]
        return state

    def turn(self, message: Any) -> Any:
        """The answer of its handler, None if there is none yet."""
        answered = [one for one in self.stepper.turn(message).answered if one.message is message]
        return answered[0].error or answered[0].value if answered else None

    def cached(self, tokens: int = 4, first: int = 0, **fields: Any) -> None:
        """Blocks of a request that has ended are on the device."""
        lease = self.leased(tokens, first, **fields)
        self.turn(Finish(lease, tokens))

    def leased(self, tokens: int = 4, first: int = 0, **fields: Any) -> int:
        message = self.request(tokens, first, **fields)
        assert isinstance(self.turn(message), AcquireResult)
        return message.lease


def test_a_request_that_hits_the_device_is_answered_in_one_step() -> None:
    index = Index()
    index.cached(4)
    message = index.request(5)
    granted = index.once(message)
    assert (granted.cached_tokens, granted.pending, granted.device_hits) == (4, False, 2)
    assert list(granted.blocks) == message.path.blocks()
    assert index.once(Commit(message.lease, 4)).count == 2
    assert index.once(Finish(message.lease, 5)).count == 2
    assert index.index.pool.free == 6


# -- requests that need their handler


def paused(index: Index) -> Acquire:
    index.turn(Pause())
    return index.request(4)


def asleep(index: Index) -> Acquire:
    index.turn(Pause(asleep=True))
    return index.request(4)


def behind_a_pause(index: Index) -> Acquire:
    """More requests were held than a turn admits, so some are held still."""
    index.turn(Pause())
    for _ in range(70):
        index.turn(index.request(2))
    index.turn(Resume())
    index.turn(Finish(1))
    assert index.core.held.requests
    assert not index.core.held.paused
    assert index.index.free == 1
    return index.request(2)


def while_a_pause_waits(index: Index) -> Acquire:
    """A sleep that waits for copies does not hold requests of before its end."""
    index.core.admission.on_idle = list
    return index.request(4)


def behind_one_that_waits_for_space(index: Index) -> Acquire:
    index.leased(6)
    index.turn(index.request(14, 20, wait_for_room=True))
    assert index.core.admission.space.requests
    return index.request(2)


def behind_a_long_request(index: Index) -> Acquire:
    """It has left the queue, is matched in several turns, and may come back."""
    index.core.admission.space.retried[70] = Held(index.request(9), Request(), 1)
    return index.request(2)


def behind_a_fork(index: Index) -> Acquire:
    lease = index.leased(7)
    index.leased(6, 40)
    index.turn(Fork(lease, 7, (90, 91), ("f", "g"), 100.0, True, True))
    assert index.core.admission.forking.requests
    return index.request(2)


def after_a_clear(index: Index) -> Acquire:
    index.leased(4)
    index.turn(Clear())
    assert index.index.retired
    return index.request(4)


def in_chunks(index: Index) -> Acquire:
    return index.request(8, chunk_tokens=2)


def with_media(index: Index) -> Acquire:
    return index.request(8, media=((1, 4),))


def while_ages_are_asked_for(index: Index) -> Acquire:
    index.index.pool.ages = Ages()  # type: ignore[assignment]
    return index.request(4)


def longer_than_a_part(index: Index) -> Acquire:
    index.index.part = 1
    return index.request(4)


def without_blocks(index: Index) -> Acquire:
    index.leased(12)
    return index.request(8, 20)


def without_blocks_that_a_long_request_takes_later(index: Index) -> Acquire:
    index.index.reserved = 7
    return index.request(4)


def below_the_watermark(index: Index) -> Acquire:
    index.core.admission.free_low = index.core.admission.free_high = 7
    return index.request(4)


def in_the_store(index: Index) -> Acquire:
    index.cached(4)
    index.core.at_once._settings = index.core.settings._replace(fetch=True)
    return index.request(8)


def on_the_host(index: Index) -> Acquire:
    index.cached(4)
    index.index.finish_evict(index.index.evict(1, 99), b"\x01")
    return index.request(5)


def being_loaded(index: Index) -> Acquire:
    load_from_the_host(index)
    return index.request(5)


def load_from_the_host(index: Index) -> tuple[int, int]:
    """A lease and its load, which is in flight."""
    index.cached(4)
    index.index.finish_evict(index.index.evict(1, 99), b"\x01")
    message = index.request(5, wait=True)
    effects = index.stepper.turn(message)
    [load] = [one for one in effects.to("cpu_evictor") if isinstance(one, Load)]
    return message.lease, load.op


class Ages:
    """Takes the times of blocks."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.mark.parametrize(
    "arrange",
    [
        paused,
        asleep,
        behind_a_pause,
        while_a_pause_waits,
        behind_one_that_waits_for_space,
        behind_a_long_request,
        behind_a_fork,
        after_a_clear,
        in_chunks,
        with_media,
        while_ages_are_asked_for,
        longer_than_a_part,
        without_blocks,
        without_blocks_that_a_long_request_takes_later,
        below_the_watermark,
        in_the_store,
        on_the_host,
        being_loaded,
    ],
)
def test_a_request_that_needs_more_changes_nothing(arrange: Callable[[Index], Acquire]) -> None:
    index = Index(recompute=False)
    message = arrange(index)
    index.turn(SetNamespace("a"))  # a turn after which nothing is taken for granted
    assert index.once(message) is None


def test_a_request_behind_one_that_waits_for_an_eviction() -> None:
    index = Index(host_tier=True)
    index.cached(8)
    index.leased(4, 40)
    index.turn(index.request(12, 20))
    [waiter] = index.core.admission.waiting.values()
    assert waiter.lacking
    lease = index.once(index.request(4))
    assert lease is None, "it would take what the other waits for"
    assert index.once(Finish(1)) is None


def test_a_request_that_never_fits_is_not_recorded() -> None:
    """Its handler does not record it either: very many would displace the scopes of others."""
    index = Index(2)
    assert index.once(index.request(6, scope=RequestScope(salt="s"))) is None
    assert index.core.announcements.scopes == {}
    assert index.index.policy.quotas.counts.rows == {}


def test_a_request_without_new_blocks_is_not_granted_below_the_watermark() -> None:
    """Its handler evicts to the watermark after every grant."""
    index = Index(6, recompute=False, free_low=2, free_high=3)
    index.cached(4)
    index.cached(2, 40)
    lease = index.leased(2, 20)
    index.turn(Reserve(lease, 2, 6))
    assert index.index.free == 0
    message = index.request(4)
    assert index.once(message) is None
    assert index.turn(message).device_hits == 2
    assert index.index.free == 1, "the only block that can be evicted is"


def test_the_namespace_of_the_moment_is_that_of_a_request() -> None:
    index = Index()
    index.cached(4)
    before = index.request(4)
    assert index.once(index.request(4)).device_hits == 1
    index.turn(SetNamespace("b"))
    granted = index.once(before)
    assert granted.device_hits == 0
    assert before.path.root == index.roots.root(PLAIN)
    assert index.core.announcements.scopes[before.path.root] is PLAIN


def test_a_scope_that_was_used_between_is_recorded_before_the_next_one() -> None:
    index = Index()
    salted = RequestScope(salt="s")
    for scope in (PLAIN, salted, PLAIN):
        assert index.once(index.request(2, scope=scope)) is not None
    assert list(index.core.announcements.scopes.values()) == [salted, PLAIN]
    [row] = index.index.policy.quotas.counts.rows.values()
    assert (row.requests, row.looked_up) == (1, 1)


def test_requests_with_one_salt_in_turn_all_have_it() -> None:
    index = Index()
    salted = RequestScope(salt="s")
    requests = [index.request(2, scope=salted) for _ in range(3)]
    for message in requests:
        assert index.once(message) is not None
    assert [message.path.salt for message in requests] == [salt_id("s")] * 3


def test_a_preempted_request_is_counted_as_resumed() -> None:
    index = Index()
    index.cached(4)
    index.core.leases.remember_preempted("r2")
    assert index.once(index.request(4)) is not None
    assert (index.core.leases.resumed, index.core.leases.requests) == (1, 1)
    assert index.core.leases.device_hits == 0


# -- commits


@pytest.mark.parametrize("computed", [-1, 6, 2**62, 2**70, -(2**70), True, 4.0, None])
def test_a_commit_of_no_number_of_tokens_needs_its_handler(computed: Any) -> None:
    index = Index()
    lease = index.leased(5)
    assert index.once(Commit(lease, computed)) is None
    assert computed is None or index.once(Finish(lease, computed)) is None


def test_a_commit_of_tokens_without_a_block_needs_its_handler() -> None:
    index = Index()
    lease = index.leased(8, chunk_tokens=4)
    assert index.once(Commit(lease, 5)) is None
    assert index.once(Commit(lease, 4)).count == 2


@pytest.mark.parametrize("settings", [{"announce": True}, {"host_tier": True}])
def test_new_blocks_that_others_are_sent_need_the_handler(settings: dict[str, bool]) -> None:
    index = Index(**settings)
    lease = index.leased(4)
    assert index.once(Commit(lease, 4)) is None
    index.turn(Commit(lease, 3))
    assert index.once(Commit(lease, 3)).count == 1
    assert index.once(Commit(lease, 0)).count == 1
    assert index.once(Commit(lease, 4)) is None


def test_a_commit_of_a_lease_that_waits_for_loads_needs_its_handler() -> None:
    index = Index(host_tier=True)
    index.core.at_once._only_known = False
    lease, op = load_from_the_host(index)
    assert index.once(Commit(lease, 0)) is None
    assert index.once(Finish(lease)) is None
    index.turn(LoadStalled(op))
    state = index.core.leases.get(lease)
    assert state is not None
    assert not state.loads


def test_a_commit_of_a_lease_that_cannot_be_used_needs_its_handler() -> None:
    index = Index()
    lease = index.leased(4)
    index.core.leases.fail_all(RankLost, "lost")
    assert index.once(Commit(lease, 0)) is None
    assert index.once(Finish(lease, 0)) is None
    assert isinstance(index.turn(Commit(lease, 0)), RankLost)


def test_a_commit_that_the_tree_refuses_needs_its_handler() -> None:
    index = Index()
    lease = index.leased(4)
    state = index.core.leases.get(lease)
    assert state is not None
    index.index.pool.give(state.path.blocks(1, 2))
    state.tree.replace(state.path, 1, -1)
    assert index.once(Commit(lease, 4)) is None
    assert isinstance(index.turn(Commit(lease, 4)), LeaseEnded)


# -- ends


@pytest.mark.parametrize(
    "settings",
    [
        {"announce": True},
        {"save": "write_through"},
        {"save": "write_through_selective"},
        {"host_tier": True, "exclusive": False},
    ],
)
def test_an_end_with_copies_or_reports_needs_its_handler(settings: dict[str, Any]) -> None:
    index = Index(**settings)
    lease = index.leased(4)
    index.turn(Commit(lease, 4))
    assert index.once(Finish(lease)) is None
    assert index.once(Finish(lease, 4)) is None


def test_an_inclusive_host_tier_gets_the_blocks_of_a_request_that_ends() -> None:
    index = Index(host_tier=True, exclusive=False)
    lease = index.leased(4)
    index.turn(Commit(lease, 4))
    assert index.once(Finish(lease)) is None
    [save] = index.stepper.turn(Finish(lease)).to("cpu_evictor")
    assert isinstance(save, Save)
    assert save.keep


def of_a_cleared_tree(index: Index) -> Finish:
    lease = index.leased(4)
    index.turn(Clear())
    index.core.index.retired.clear()
    return Finish(lease)


def with_hints(index: Index) -> Finish:
    return Finish(index.leased(4), hints=Hints(priority=1))


def of_a_request_with_hints(index: Index) -> Finish:
    return Finish(index.leased(4, hints=Hints()))


def with_quotas(index: Index) -> Finish:
    index.turn(ChangeShares(SetQuota("s", Quota(device=1))))
    return Finish(index.leased(4))


def of_a_cleared_salt(index: Index) -> Finish:
    lease = index.leased(4, scope=RequestScope(salt="s"))
    index.turn(Commit(lease, 4))
    index.turn(Clear(salt="s"))
    return Finish(lease)


def of_very_many_blocks(index: Index) -> Finish:
    lease = index.leased(8)
    index.index.part = 3
    return Finish(lease)


def ages(index: Index) -> Finish:
    lease = index.leased(4)
    index.index.pool.ages = Ages()  # type: ignore[assignment]
    return Finish(lease)


def that_one_waits_for(index: Index) -> Finish:
    lease = index.leased(6)
    index.turn(index.request(14, 20, wait_for_room=True))
    return Finish(lease)


def during_a_pause(index: Index) -> Finish:
    lease = index.leased(4)
    index.turn(Pause())
    return Finish(lease)


def after_a_pause_that_is_not_answered(index: Index) -> Finish:
    """A copy is in flight still: an end may be what its answer waits for."""
    lease = index.leased(4)
    index.core.admission.copies += 1
    index.turn(Pause())
    index.turn(Resume())
    return Finish(lease)


@pytest.mark.parametrize(
    "arrange",
    [
        after_a_pause_that_is_not_answered,
        of_a_cleared_tree,
        with_hints,
        of_a_request_with_hints,
        with_quotas,
        of_a_cleared_salt,
        of_very_many_blocks,
        ages,
        that_one_waits_for,
        during_a_pause,
    ],
)
def test_an_end_that_needs_more_changes_nothing(arrange: Callable[[Index], Finish]) -> None:
    index = Index()
    message = arrange(index)
    assert index.once(message) is None


class Recorder:
    """A tree that notes the arguments of `end`."""

    def __init__(self, tree: Any) -> None:
        self.tree, self.ends = tree, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    def end(self, path: Path, *args: Any) -> Any:
        self.ends.append(args)
        return self.tree.end(path, *args)


@pytest.mark.parametrize(
    ("added", "output", "learned"), [(0, None, -1), (1, None, 1), (1, 5, 5), (0, 0, 0)]
)
def test_the_policy_learns_the_length_and_the_time_of_an_output(
    added: int, output: int | None, learned: int
) -> None:
    index = Index()
    index.index.policy = TierPolicies(LifeTables(), lambda: 7.0)
    index.index.tree = recorder = Recorder(index.index.tree)  # type: ignore[assignment]
    message = index.request(4)
    assert answered_at_once(index.stepper, message) is not None
    if added:
        more = Path(BLOCK, bytes(32))
        more.extend([1] * added)
        index.turn(Extend(message.lease, 4, more))
    assert answered_at_once(index.stepper, Finish(message.lease, None, output)) is not None
    assert recorder.ends == [(100, learned, 7.0)]


def test_leases_that_have_ended_need_the_handler() -> None:
    index = Index()
    lease = index.leased(4)
    assert index.once(Finish(lease)).count == 0
    assert index.once(Finish(lease)) is None
    assert index.once(Commit(lease, 0)) is None
    assert isinstance(index.turn(Finish(lease)), LeaseEnded)


def test_an_end_that_only_its_handler_can_do_commits_at_most_its_tokens() -> None:
    index = Index()
    index.turn(ChangeShares(SetQuota("s", Quota(device=1))))
    lease = index.leased(4)
    assert answered_at_once(index.stepper, Finish(lease, 4)) is None
    assert index.turn(Finish(lease, 4)).count == 2
    index.stepper.actor.check()
    assert len(index.core.leases) == 0


def test_a_pool_notes_the_age_of_a_single_block() -> None:
    took: list[list[int]] = []
    index = Index()
    index.index.pool.ages = ages = Ages()  # type: ignore[assignment]
    ages.took = took.append  # type: ignore[attr-defined]
    index.index.pool.take(1)
    index.index.pool.take(2)
    assert took == [[0], [1, 2]]


# -- everything


def test_answers_in_one_step_are_those_of_the_handlers() -> None:
    """The same messages in the same order leave both with the same state."""
    reached: Counter[str] = Counter()
    for seed in range(250):
        twins = Twins(seed, reached)
        try:
            twins.run(120)
        except BaseException as error:
            error.add_note(f"seed {seed}, {twins.first.settings}: {twins.trace[-12:]}")
            raise
    missing = [name for name in WANTED if reached[name] < 100]
    assert not missing, f"hardly reached: {missing} of {reached}"


def test_blocks_with_one_key_may_both_have_been_evicted():
    """RETAIN remembers a block by a hash of its tokens. A check took the second one for damage."""
    Twins(5321, Counter()).run(300)
