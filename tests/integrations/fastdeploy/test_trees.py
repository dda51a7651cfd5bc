"""The device's prefix index and its pool as trees of shared paths: what FastDeploy's tests of its
block pool, radix tree and cache manager expect."""

from __future__ import annotations

import pytest

from kvactors.errors import ConfigError, NoRoom
from kvactors.integrations.fastdeploy.requests import EngineBlockIndex, EngineBlocks, IndexedBlock
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request
from tests.integrations.fastdeploy.invariants import check, check_blocks, check_index

A = list(range(12))


class Tree:
    """A prefix index, with paths of small integers for block hashes."""

    def __init__(self) -> None:
        self.index = EngineBlockIndex()
        self.ids = iter(range(10_000))

    def insert(self, *path: int) -> list[IndexedBlock]:
        """A request computes a path and holds it."""
        hashes = self.hashes(path)
        held = self.index.match(hashes)
        self.index.tick()
        self.index.hold(held)
        for block_hash in hashes[len(held) :]:
            parent = held[-1] if held else None
            held.append(self.index.add(block_hash, parent, next(self.ids)))
        check_index(self.index)
        return held

    def find(self, *path: int) -> list[int]:
        """Device blocks of a path."""
        return [node.block for node in self.index.match(self.hashes(path))]

    def refs(self, *path: int) -> list[int]:
        """Requests that hold each block of a path."""
        return [node.refs for node in self.index.match(self.hashes(path))]

    @staticmethod
    def hashes(path: tuple[int, ...]) -> list[bytes]:
        """A hash stands for the whole path up to its block."""
        return [bytes(path[: i + 1]) for i in range(len(path))]


@pytest.fixture
def tree():
    return Tree()


# -- the pool


def test_none_and_too_many_blocks():
    pool = EngineBlocks(4)
    assert pool.take(0, "a") == []
    with pytest.raises(NoRoom, match="5 device blocks needed, 4 available"):
        pool.take(5, "a")
    assert (pool.free, pool.held) == (4, {})
    check_blocks(pool)


def test_a_released_block_has_no_owner_any_more():
    pool = EngineBlocks(3)
    blocks = pool.take(2, "a")
    pool.give(blocks[:1], "a")
    assert pool.held == {1: "a"}
    assert (pool.free, pool.take(1, "b")) == (2, [0])
    assert pool.held == {0: "b", 1: "a"}
    with pytest.raises(ValueError, match="block 0 is held for request 'b', not 'a'"):
        pool.give([0], "a")
    check_blocks(pool)


@pytest.mark.parametrize("total", [9, 2, 4, 0])
def test_a_pool_without_blocks_in_use_gets_any_size(engine, total):
    one = engine(gpu=4)
    one.config.cache_config.total_block_num = total
    one.manager.update_cache_config(one.config.cache_config)
    assert one.free_blocks == list(range(total))
    assert one.manager.allocate_gpu_blocks(total, "a") == list(range(total))
    assert not one.manager.can_allocate_gpu_blocks(1)
    check(one.manager)


@pytest.mark.parametrize("total", [1, 3, 9])
def test_a_pool_with_blocks_in_use_keeps_its_size(engine, total):
    one = engine(gpu=4)
    one.manager.allocate_gpu_blocks(2, "a")
    one.config.cache_config.total_block_num = total
    with pytest.raises(ConfigError, match=f"4 and cannot become {total}: 2 blocks are in use"):
        one.manager.update_cache_config(one.config.cache_config)
    assert one.free_blocks == [2, 3]
    assert one.manager.num_gpu_blocks == 4


def test_half_of_the_blocks_are_available_after_half_were_taken(engine):
    manager = engine(gpu=8).manager
    assert manager.available_gpu_resource == 1.0
    manager.allocate_gpu_blocks(4, "a")
    assert manager.available_gpu_resource == 0.5


@pytest.mark.parametrize(("count", "answer"), [(-1, True), (0, True), (4, True), (5, False)])
def test_the_limits_of_a_question(engine, count, answer):
    assert engine(gpu=4).manager.can_allocate_gpu_blocks(count) is answer


# -- paths


def test_paths_share_the_blocks_of_their_common_start(tree):
    tree.insert(1, 2)
    tree.insert(1, 3)
    assert len(tree.index.blocks) == 3, "the root is no block"
    assert tree.find(1, 2)[0] == tree.find(1, 3)[0]
    assert tree.refs(1) == [2]
    assert tree.refs(1, 3)[1:] == [1]


def test_a_path_of_several_requests_is_counted_for_each(tree):
    requests = [tree.insert(1, 2) for _ in range(5)]
    assert len(tree.index.blocks) == 2
    assert tree.refs(1, 2) == [5, 5]
    for held, left in zip(requests, (4, 3, 2, 1, 0), strict=True):
        tree.index.release(held)
        assert tree.refs(1, 2) == [left, left]
        check_index(tree.index)
    assert tree.index.unreferenced == 2


def test_a_search_finds_all_of_a_path_or_its_start_or_none(tree):
    tree.insert(1, 2, 3)
    assert len(tree.find(1, 2, 3)) == 3
    assert len(tree.find(1, 2, 9)) == 2
    assert tree.find(2, 3) == tree.find() == []


def test_a_shared_start_stays_held_until_its_last_request_ends(tree):
    first, second = tree.insert(1, 2, 3), tree.insert(1, 2, 4)
    tree.index.release(first)
    assert tree.index.unreferenced == 1
    assert [block.hash for block in tree.index.evict(9)] == [bytes((1, 2, 3))]
    assert tree.find(1, 2, 4) == [block.block for block in second]
    tree.index.release(second)
    assert tree.index.unreferenced == 3


def test_100_branches_leave_half_of_their_requests(tree):
    requests = [tree.insert(0, branch) for branch in range(100)]
    assert tree.refs(0) == [100]
    for held in requests[:50]:
        tree.index.release(held)
    assert tree.refs(0) == [50]
    assert len(tree.index.evict(200)) == 50
    assert len(tree.index.blocks) == 51
    check_index(tree.index)


def test_a_chain_of_20_leaves_from_its_end(tree):
    path = tuple(range(20))
    tree.index.release(tree.insert(*path))
    for left in range(19, 0, -1):
        (victim,) = tree.index.evict(1)
        assert victim.depth == left + 1
        assert len(tree.find(*path)) == left
        check_index(tree.index)


def test_an_eviction_of_none_removes_none(tree):
    tree.index.release(tree.insert(1, 2))
    assert tree.index.evict(0) == []
    assert len(tree.find(1, 2)) == 2


def test_too_few_evictable_blocks_change_nothing(engine):
    one = engine(gpu=4, cpu=4)
    one.serve("a", A[:4])
    one.manager.allocate_gpu_blocks(2, "other")
    assert not one.manager.can_allocate_gpu_blocks(3)
    assert one.match(Request("b", A[:4]))[2]["gpu_match_token_num"] == 4, "nothing was evicted"
    check(one.manager)


# -- requests


def test_a_request_that_computes_known_blocks_gets_its_own_back(engine):
    """Two requests were matched before either had computed: the second one's blocks are spare."""
    one = engine(gpu=8)
    first, second = Request("a", A[:8]), Request("b", A[:8])
    for request in (first, second):
        one.match(request)
        request.block_tables = one.manager.allocate_gpu_blocks(2, request.request_id)
    spare = second.block_tables
    for request in (first, second):
        one.manager.update_cache_blocks(request, BLOCK_SIZE, 8)
    one.free(second)
    assert set(spare) <= set(one.free_blocks)
    one.free(first)
    assert one.match(Request("c", A[:8]))[0] == [0, 1]


def test_two_of_three_blocks_are_used_again(engine):
    one = engine(gpu=8)
    one.serve("a", A)
    request = Request("b", [*A[:8], 90, 91, 92, 93])
    metrics = one.prefill(request)
    assert metrics["gpu_match_token_num"] == 8
    assert one.manager.statistics().free_gpu_blocks == 4, "the two paths have 4 blocks"
    one.free(request)
    check(one.manager)


def test_a_full_pool_gives_the_next_request_evicted_blocks(engine):
    one = engine(gpu=100)
    for number in range(25):
        one.serve(f"r{number}", [number] * 16)
    found = one.manager.statistics()
    assert (found.free_gpu_blocks, found.evictable_gpu_blocks) == (0, 100)
    assert one.manager.can_allocate_gpu_blocks(3)
    assert len(one.manager.allocate_gpu_blocks(3, "next")) == 3
    check(one.manager)


def test_a_path_moves_to_the_host_and_back_in_its_order(engine):
    one = engine(gpu=4, cpu=4)
    one.serve("a", A)
    one.manager.free_block_ids(3)
    assert one.free_blocks == [0, 1, 2, 3]
    request = Request("b", [*A, 1])
    metrics = one.prefill(request)
    assert metrics["cpu_match_token_num"] == 12
    assert metrics["gpu_recv_block_ids"] == request.block_tables[:3]
    assert not one.wrong(request, 13)
    one.free(request)
    assert one.prefill(Request("c", [*A, 1]))["gpu_match_token_num"] == 12


def test_a_prompt_of_less_than_a_block_has_no_hash(engine):
    one = engine(gpu=2)
    for name in ("a", "b"):
        assert one.match(Request(name, A[:3]))[:2] == ([], 0)
    assert not one.manager._cache.index.blocks


def test_without_a_host_tier_an_evicted_path_is_gone(engine):
    one = engine(gpu=4)
    one.serve("a", A)
    one.manager.free_block_ids(3)
    assert one.match(Request("b", A))[:2] == ([], 0)
    assert one.manager.num_cpu_blocks == 0
