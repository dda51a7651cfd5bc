"""Block tables: reserve, extend and truncate of one lease, beside a plain list of tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvactors.actor.sliced import finish
from kvactors.checks import added_media, request_path
from kvactors.errors import LeaseBusy, LeaseEnded, NoRoom, NotReady, RankLost, TokensCommitted
from kvactors.identity import PLAIN
from kvactors.native import Path
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.leases import LeaseState
from kvactors.prefix_index.messages import (
    Ack,
    Acquire,
    AcquireResult,
    Clear,
    Commit,
    Extend,
    Finish,
    Reserve,
    Truncate,
)
from kvactors.prefix_index.work import NextSlice
from tests.prefix_index.objects import BLOCK, Request, answers, cache, core, effects_of, work_of

DEVICE_BLOCKS = 9
LEASE = 1
tokens_to_add = st.lists(st.sampled_from([0, 0, 1]), max_size=2 * BLOCK + 1)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


def added(tokens: list[int]) -> Path:
    path = Path(BLOCK, bytes(32))
    path.extend(tokens)
    return path


def asked(message: Any) -> tuple[Any, Request]:
    """The arguments of its handler."""
    return message, Request(message)


class Model:
    """A lease in plain Python. items: (offset, length, hash). table: length of the block table.
    committed: blocks."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.items: list[tuple[int, int, str]] = []
        self.table = blocks_for(len(tokens))
        self.committed = 0

    def extend(self, tokens: list[int], items: list[tuple[int, int, str]]) -> int:
        """Returns the blocks that it needs."""
        start = len(self.tokens)
        self.tokens = self.tokens + tokens
        self.items = self.items + [(start + at, length, name) for at, length, name in items]
        return self.reserve(0)

    def reserve(self, count: int) -> int:
        """Returns the blocks that it needs."""
        before, self.table = self.table, max(self.table, blocks_for(len(self.tokens) + count))
        return self.table - before

    def truncate(self, kept: int) -> int:
        """Returns the blocks that are free by it."""
        self.tokens = self.tokens[:kept]
        self.items = [item for item in self.items if item[0] < kept]
        before, self.table = self.table, min(self.table, blocks_for(kept))
        return before - self.table

    def cuts(self, kept: int) -> bool:
        """Whether a media item would be cut."""
        return any(at < kept < at + length for at, length, _ in self.items)

    def hashes(self, root: bytes) -> bytes:
        """Of the full blocks, as a request of these tokens has them."""
        if len(self.tokens) < BLOCK:
            return b""
        path, _ = request_path(BLOCK, root, self.tokens, self.items)
        return path.hashes(0, path.num_full_blocks)


class TablesMachine(RuleBasedStateMachine):
    """Everything that changes the table of one lease, with a second request that shares it."""

    @initialize(
        tokens=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=2 * BLOCK),
        host=st.booleans(),
        part=st.sampled_from([1, 2, 100]),
    )
    def start(self, tokens: list[int], host: bool, part: int) -> None:
        self.state = core(DEVICE_BLOCKS, part=part, host_tier=host, exclusive=True)
        self.offload = host
        self.model = Model(tokens)
        path, _ = request_path(BLOCK, bytes(32), tokens, ())
        self.answer(
            effects_of(self.state.acquire, *asked(Acquire(LEASE, "r", path, 10.0))), AcquireResult
        )
        self.lease = held(self.state, LEASE)
        self.model.committed = self.lease.path.num_committed

    def answer(self, actions: list[Any], *kinds: type) -> Any:
        """Carry out what a turn left to later turns. Returns its one answer."""
        queue, done = list(actions), []
        while queue:
            action = queue.pop(0)
            if isinstance(action, NextSlice):
                queue += work_of(self.state.out, action.work)
            else:
                done.append(action)
        [value] = answers(done)
        assert isinstance(value, kinds), value
        return value

    def available(self) -> int:
        """Blocks that can be had at once."""
        evictable = 0 if self.offload else self.state.index.evictable()
        return self.state.index.free + evictable

    @rule(tokens=tokens_to_add, media=st.booleans(), name=st.sampled_from(["a", "b"]))
    def extend(self, tokens: list[int], media: bool, name: str) -> None:
        items = [(len(tokens) // 2, len(tokens) - len(tokens) // 2, name)] if media else []
        items = [item for item in items if item[1]]
        position = len(self.model.tokens)
        needed = blocks_for(position + len(tokens)) - self.model.table
        if needed > self.available():
            return
        extras, _ = added_media(BLOCK, position, len(tokens), items)
        message = Extend(LEASE, position, added(tokens), extras)
        granted = self.answer(effects_of(self.state.grow, message, Request(message)), AcquireResult)
        assert len(granted.blocks) == self.model.extend(tokens, items)

    @rule(count=st.integers(0, 3 * BLOCK))
    def reserve(self, count: int) -> None:
        position = len(self.model.tokens)
        message = Reserve(LEASE, position, position + count)
        needed = blocks_for(position + count) - self.model.table
        if needed > self.available():
            if needed > self.state.index.free + self.state.index.evictable():
                before = self.lease.path.blocks()
                actions = effects_of(self.state.grow, message, Request(message))
                self.answer(actions, NoRoom)
                assert self.lease.path.blocks() == before
            return
        granted = self.answer(effects_of(self.state.grow, message, Request(message)), AcquireResult)
        assert len(granted.blocks) == self.model.reserve(count)

    @rule(less=st.integers(0, 3 * BLOCK))
    def truncate(self, less: int) -> None:
        kept = max(0, len(self.model.tokens) - less)
        if self.model.cuts(kept):
            return  # refused in the caller
        before, free = self.lease.path.blocks(), self.state.index.free
        message = Truncate(LEASE, len(self.model.tokens), kept)
        actions = effects_of(self.state.truncate, message, Request(message))
        if kept < self.model.committed * BLOCK:
            self.answer(actions, TokensCommitted)
            assert self.lease.path.blocks() == before
            return
        left = self.answer(actions, Ack).count
        freed = self.model.truncate(kept)
        assert left == self.model.table
        assert self.lease.path.blocks() == before[:left]
        assert self.state.index.free == free + freed

    @rule(less=st.integers(0, BLOCK))
    def commit(self, less: int) -> None:
        computed = max(0, len(self.model.tokens) - less)
        actions = effects_of(self.state.commit, Commit(LEASE, computed), Request())
        committed = self.answer(actions, Ack).count
        if not self.lease.tree.retired:
            self.model.committed = max(self.model.committed, computed // BLOCK)
        assert committed == self.model.committed

    @rule(sure=st.integers(0, 3))
    def clear(self, sure: int) -> None:
        if not sure:
            self.state.clear(Clear(), Request())
            while self.state.index.sweeping:
                self.state.index.sweep()

    @rule()
    def share(self) -> None:
        """Another request of the same tokens has every committed block as a hit."""
        if len(self.model.tokens) < BLOCK or self.lease.tree.retired:
            return
        root = self.state.roots.root(PLAIN)
        path, _media = request_path(BLOCK, root, self.model.tokens, self.model.items)
        if blocks_for(len(self.model.tokens)) - self.model.committed > self.available():
            return
        shared = Acquire(2, "s", path, 10.0)
        granted = self.answer(effects_of(self.state.acquire, *asked(shared)), AcquireResult)
        assert granted.device_hits >= self.model.committed
        self.answer(effects_of(self.state.finish, Finish(2, None), Request()), Ack)

    @invariant()
    def alike(self) -> None:
        if not hasattr(self, "lease"):
            return
        path, model = self.lease.path, self.model
        assert path.num_tokens == len(model.tokens)
        assert path.num_blocks == model.table
        assert path.num_committed == model.committed
        full = path.num_full_blocks
        root = self.state.roots.root(PLAIN)
        assert path.hashes(0, full) == model.hashes(root), "a block has another block's hash"
        blocks = path.blocks()
        assert -1 not in blocks
        assert len(set(blocks)) == len(blocks)
        assert all(map(self.state.index.pool.owners, blocks))
        finish(self.state.index.check_steps())

    def teardown(self) -> None:
        if hasattr(self, "lease"):
            self.answer(effects_of(self.state.finish, Finish(LEASE, None), Request()), Ack)
            while self.state.index.sweeping:
                self.state.index.sweep()
            in_tree = self.state.index.tree.statistics()["device"]
            assert self.state.index.free + in_tree == DEVICE_BLOCKS


def held(state: PrefixIndex, number: int) -> LeaseState:
    lease = state.leases.get(number)
    assert lease is not None
    return lease


def test_tables_agree_with_a_plain_list_of_tokens():
    machine = settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True)
    run_state_machine_as_test(TablesMachine, settings=machine)


def granted(state: PrefixIndex, tokens: int, number: int = LEASE) -> LeaseState:
    path = Path(BLOCK, bytes(32))
    path.extend(list(range(tokens)))
    state.acquire(*asked(Acquire(number, f"r{number}", path, 10.0)))
    return held(state, number)


def test_a_truncate_of_tokens_that_load_is_refused():
    state = core(DEVICE_BLOCKS, fetch=True)
    lease = granted(state, 3 * BLOCK)
    assert lease.loads
    actions = effects_of(state.truncate, Truncate(LEASE, 3 * BLOCK, BLOCK), Request())
    assert isinstance(answers(actions)[0], NotReady)
    assert lease.path.num_tokens == 3 * BLOCK


@pytest.mark.parametrize("kind", [NoRoom, RankLost])
def test_a_lease_that_failed_is_not_truncated(kind):
    state = core(DEVICE_BLOCKS)
    lease = granted(state, 3 * BLOCK)
    arguments = (1, 0) if kind is NoRoom else ("lost",)
    lease.fault = partial(kind, *arguments)
    [error] = answers(effects_of(state.truncate, Truncate(LEASE, 3 * BLOCK, 0), Request()))
    assert isinstance(error, kind)
    assert lease.path.num_tokens == 3 * BLOCK


@pytest.mark.parametrize("message", [Reserve(LEASE, BLOCK, BLOCK + 1), Truncate(LEASE, BLOCK, 0)])
def test_a_change_at_another_position_or_of_an_ended_lease_is_refused(message):
    state = core(DEVICE_BLOCKS)
    call = state.grow if isinstance(message, Reserve) else state.truncate
    [error] = answers(effects_of(call, message, Request(message)))
    assert isinstance(error, LeaseEnded)
    granted(state, 3 * BLOCK)
    [error] = answers(effects_of(call, message, Request(message)))
    assert isinstance(error, LeaseBusy)


def test_reserved_blocks_wait_for_evictions_and_a_cancelled_wait_ends():
    """A truncate comes after the cancelled reserve, and before its withdrawal."""
    state = core(4)
    cache(state, 3, first=50)
    lease = granted(state, 1)
    message = Reserve(LEASE, 1, 1 + 2 * BLOCK)
    waits = Request(message)
    actions = effects_of(state.grow, message, waits)
    assert not answers(actions)
    assert state.queue.waiting
    busy = effects_of(state.truncate, Truncate(LEASE, 1, 0), Request())
    assert isinstance(answers(busy)[0], LeaseBusy)
    waits.cancel()
    done = effects_of(state.truncate, Truncate(LEASE, 1, 0), Request())
    assert isinstance(answers(done)[-1], Ack)
    assert not state.queue.waiting
    assert lease.path.num_blocks == 0


def test_freed_blocks_go_to_the_request_that_waits():
    state = core(6, host_tier=False)
    granted(state, 4 * BLOCK)
    path = Path(BLOCK, bytes(32))
    path.extend(list(range(100, 100 + 3 * BLOCK)))
    state.index.closing = 1  # blocks are on their way back, so the request waits
    assert not answers(effects_of(state.acquire, *asked(Acquire(2, "r2", path, 10.0))))
    actions = effects_of(state.truncate, Truncate(LEASE, 4 * BLOCK, 3 * BLOCK), Request())
    assert [type(one) for one in answers(actions)] == [Ack, AcquireResult]
