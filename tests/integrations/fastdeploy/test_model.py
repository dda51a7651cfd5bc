"""A state machine: the manager's blocks against plain lists and sets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvactors.errors import NoRoom
from kvactors.integrations.fastdeploy import PrefixCacheManager
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request, make_config
from tests.integrations.fastdeploy.invariants import check

Key = tuple[int, ...]


class PlainCache:
    """Which block holds which prefix, and for how many requests."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = set(range(total))
        self.cached: dict[Key, int] = {}
        self.refs: dict[Key, int] = {}

    def evictable(self) -> int:
        return sum(not refs for refs in self.refs.values())

    def drop_evicted(self, free: set[int]) -> list[Key]:
        """The prefixes that left, by the blocks that are free now."""
        gone = [key for key, block in self.cached.items() if block in free]
        for key in gone:
            assert self.refs.pop(key) == 0, f"{key} is held and was evicted"
            del self.cached[key]
        for key in self.cached:
            assert len(key) == BLOCK_SIZE or key[:-BLOCK_SIZE] in self.cached, "a path has a gap"
        self.free |= free
        return gone


class BlocksAgainstAPlainModel(RuleBasedStateMachine):
    """Requests over two tokens, so that prefixes are shared often."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 7
        self.manager = PrefixCacheManager(make_config(self.total), 1, environ={})
        self.model = PlainCache(self.total)
        self.requests: dict[str, Request] = {}
        self.keys: dict[str, list[Key]] = {}  # held prefixes
        self.number = 0

    def _absorb(self) -> None:
        """Take in what an eviction has freed: the only free blocks that the model has not."""
        free = set(self.manager.gpu_free_block_list)
        new = free - self.model.free
        assert new <= set(self.model.cached.values()), f"blocks {new} came from nowhere"
        self.model.drop_evicted(new)

    def _keys_of(self, request: Request, blocks: int) -> list[Key]:
        tokens = tuple(request.tokens)
        return [tokens[: BLOCK_SIZE * (i + 1)] for i in range(blocks)]

    @rule(bits=st.integers(0, 255), length=st.integers(1, 4 * BLOCK_SIZE))
    def match(self, bits: int, length: int) -> None:
        self._match(bits, length)

    @rule(bits=st.integers(0, 15), length=st.integers(BLOCK_SIZE, 4 * BLOCK_SIZE))
    def serve(self, bits: int, length: int) -> None:
        """A whole request, from the match to the release."""
        request = self._match(bits, length)
        self._allocate(request, -(-length // BLOCK_SIZE) - len(request.block_tables))
        self._commit(request)
        self._release(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 4))
    def allocate(self, data: Any, count: int) -> None:
        self._allocate(self._some(data), count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        self._commit(self._some(data))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self._release(self._some(data))

    def _match(self, bits: int, length: int) -> Request:
        prompt = [(bits >> (i // BLOCK_SIZE)) & 1 for i in range(length)]
        request = Request(f"r{self.number}", prompt)
        self.number += 1
        blocks, tokens, _ = self.manager.request_match_blocks(request, BLOCK_SIZE)
        expected = []
        for key in self._keys_of(request, length // BLOCK_SIZE):
            if key not in self.model.cached:
                break
            expected.append(key)
        assert blocks == [self.model.cached[key] for key in expected]
        assert tokens == len(blocks) * BLOCK_SIZE
        request.block_tables = blocks
        for key in expected:
            self.model.refs[key] += 1
        self.requests[request.request_id] = request
        self.keys[request.request_id] = expected
        return request

    def _allocate(self, request: Request, count: int) -> None:
        can = len(self.model.free) + self.model.evictable() >= count
        assert self.manager.can_allocate_gpu_blocks(count) == can
        self._absorb()
        if not can:
            with pytest.raises(NoRoom):
                self.manager.allocate_gpu_blocks(count, request.request_id)
            return
        lowest = sorted(self.model.free)[: max(0, count)]
        assert self.manager.allocate_gpu_blocks(count, request.request_id) == lowest
        self.model.free -= set(lowest)
        request.block_tables += lowest

    def _commit(self, request: Request) -> None:
        held = self.keys[request.request_id]
        full = min(len(request.tokens), len(request.block_tables) * BLOCK_SIZE) // BLOCK_SIZE
        self.manager.update_cache_blocks(request, BLOCK_SIZE, full * BLOCK_SIZE)
        for i, key in list(enumerate(self._keys_of(request, full)))[len(held) :]:
            self.model.cached.setdefault(key, request.block_tables[i])
            self.model.refs[key] = self.model.refs.get(key, 0) + 1
            held.append(key)
        assert request.num_cached_blocks == max(full, len(held))

    def _release(self, request: Request) -> None:
        name = request.request_id
        self.manager.release_block_ids(request)
        self.manager.recycle_gpu_blocks(request.block_tables[request.num_cached_blocks :], name)
        del self.requests[name]
        for key in self.keys.pop(name):
            self.model.refs[key] -= 1
        self.model.free |= set(request.block_tables) - set(self.model.cached.values())

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        before, evictable = len(self.model.free), self.model.evictable()
        self.manager.free_block_ids(count)
        self._absorb()
        assert len(self.model.free) == before + min(count, evictable)

    def _some(self, data: Any) -> Request:
        return self.requests[data.draw(st.sampled_from(sorted(self.requests)))]

    @invariant()
    def blocks_are_in_one_place(self) -> None:
        check(self.manager)
        assert set(self.manager.gpu_free_block_list) == self.model.free
        used = [block for request in self.requests.values() for block in request.block_tables]
        assert not self.model.free.intersection(used)
        found = self.manager.statistics()
        assert found.evictable_gpu_blocks == self.model.evictable()


BlocksAgainstAPlainModel.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None
)
TestBlocks = BlocksAgainstAPlainModel.TestCase
