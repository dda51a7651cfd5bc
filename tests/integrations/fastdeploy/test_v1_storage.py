"""Storage of v1: what workers write, prefetches, and the order of reads and copies."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import pytest

from kvactors.errors import ConfigError, LayoutError, StoreError
from kvactors.integrations.fastdeploy import CacheController, CacheManager
from kvactors.integrations.fastdeploy.v1_storage import StorageTask
from kvactors.storage import factory
from tests.integrations.fastdeploy.attention import Attention
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request, make_config
from tests.integrations.fastdeploy.oracle import ModelMemory
from tests.integrations.fastdeploy.simulation import POOL, FaultyPool, made_pool
from tests.integrations.fastdeploy.test_v1_manager import LAYOUT, A, B, C, Engine
from tests.tier_cache.faulty_stores import Faults

OPTIONS = {"layout": LAYOUT, "storage": {"timeout_s": 5.0}}
GIVEN = {"options": OPTIONS, "environ": POOL}


@pytest.fixture
def pool(monkeypatch):
    """The objects of a store that outlives its engines."""
    FaultyPool.pool.clear()
    monkeypatch.setattr(factory, "make_backend", made_pool)
    yield FaultyPool.pool
    FaultyPool.pool.clear()
    Faults.mode = FaultyPool.mode = "ok"


@pytest.fixture
def engine(pool):
    made = []

    def make(gpu=3, cpu=4, **settings):
        made.append(Engine(gpu, cpu, backend="mooncake", **GIVEN | settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def backed_up(one):
    """Serve requests until the blocks of `A` are in storage."""
    one.serve("a", A)
    one.serve("b", B[:3])
    one.serve("c", B[:2])
    one.close()


def prefetched(one, prompt):
    """The prefetches of a request, and what the workers answer."""
    assert one.manager.prefetch_storage(Request("early", prompt))
    found = one.manager.drain_pending_prefetches()
    tasks = [w.prefetch_from_storage(p.metadata) for p in found for w in one.workers]
    assert all(task.wait(5.0) for task in tasks)
    return found, tasks


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_engine_finds_what_finished_requests_left_in_storage(engine, pool, ranks):
    backed_up(engine(ranks=ranks))
    assert len(pool) == 2 * ranks, "each rank has its part of a block"
    one = engine(ranks=ranks)
    assert one.serve("again", [*A, 9]) == (0, 2), "the model has compared the bytes"
    assert one.manager.statistics().storage_tokens == 2 * BLOCK_SIZE
    assert one.serve("third", [*A, 9]) == (2, 0)
    assert one.manager.statistics().storage_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("mode", ["damages", "unreachable"])
def test_what_a_worker_cannot_read_is_computed(engine, mode):
    backed_up(engine())
    one = engine()
    request = Request("early", [*A, 9])
    assert one.manager.prefetch_storage(request)
    Faults.mode = mode
    (pending,) = one.manager.drain_pending_prefetches()
    task = one.workers[0].prefetch_from_storage(pending.metadata)
    assert task.wait(5.0)
    assert task.result is None
    assert task.error == "2 of 2 blocks are not there"
    with pytest.raises(StoreError, match="not there"):
        task.get_result()
    one.manager.abort_prefetch_blocks(pending.host_block_ids)
    assert one.manager.num_free_host_blocks == 4
    one.manager.match_prefix(request)
    assert request.match_result.total_matched_blocks == 0


def test_one_rank_without_its_part_fails_for_itself(engine, pool):
    backed_up(engine(ranks=2))
    one = engine(ranks=2)
    FaultyPool.asked.clear()
    assert one.manager.prefetch_storage(Request("early", A))
    for name in set(pool) - set(FaultyPool.asked):
        del pool[name]  # the second rank's
    (pending,) = one.manager.drain_pending_prefetches()
    tasks = [worker.prefetch_from_storage(pending.metadata) for worker in one.workers]
    assert all(task.wait(5.0) for task in tasks)
    assert [task.result for task in tasks] == [pending.host_block_ids, None]
    one.manager.abort_prefetch_blocks(pending.host_block_ids)
    assert one.serve("a", A) == (0, 0)


def test_a_prefetch_takes_only_what_device_and_host_lack(engine):
    backed_up(engine())
    one = engine(8, 8)
    one.serve("a", [*A[:4], 5])
    found, _ = prefetched(one, [*A, 9])
    assert [len(one.host_block_ids) for one in found] == [1]
    assert not one.manager.prefetch_storage(Request("other", C))
    assert one.manager.drain_pending_prefetches() == []
    one.manager.update_storage_blocks_to_host(found[0].host_block_ids)
    assert not one.manager.prefetch_storage(Request("same", [*A, 9]))


def test_a_prefetch_crosses_processes(engine):
    backed_up(engine())
    one = engine()
    (pending,), _ = prefetched(one, A)
    assert pickle.loads(pickle.dumps(pending)) == pending
    one.manager.abort_prefetch_blocks(pending.host_block_ids)


def test_storage_that_does_not_answer_is_not_waited_for_long(engine, pool):
    one = engine(options=OPTIONS | {"storage": {"timeout_s": 0.3}})
    FaultyPool.mode = "hang"
    begun = time.monotonic()
    assert not one.manager.prefetch_storage(Request("a", A))
    assert time.monotonic() - begun < 5.0, "its limit is 0.3 s"
    FaultyPool.mode = "ok"
    assert one.serve("a", A) == (0, 0)


def test_after_a_reset_a_prefetch_ends_as_before(engine):
    backed_up(engine())
    one = engine()
    (pending,), _ = prefetched(one, A)
    assert one.manager.reset_cache()
    one.manager.update_storage_blocks_to_host(pending.host_block_ids)
    assert one.manager.num_free_host_blocks == 4
    assert one.serve("a", A) == (0, 2), "it is read again"


@pytest.mark.parametrize("blocks", [None, "0", [[0]], [0.0]])
def test_host_blocks_that_are_no_integers_are_refused(engine, blocks):
    one = engine()
    for end in (one.manager.update_storage_blocks_to_host, one.manager.abort_prefetch_blocks):
        with pytest.raises(TypeError, match="host_block_ids must be an integer"):
            end(blocks)


def test_host_blocks_without_a_prefetch_are_no_error(engine):
    one = engine()
    one.manager.update_storage_blocks_to_host([0, 3])
    one.manager.abort_prefetch_blocks([1])
    assert one.manager.num_free_host_blocks == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_is_written_by_every_worker(tmp_path, ranks):
    """FastDeploy's back end `file` is a folder of objects, which the scheduler's process reads."""
    for variable in (True, False):
        environ = {"FILE_BACKEND_STORAGE_DIR": str(tmp_path)} if variable else {}
        place = {} if variable else {"directory": str(tmp_path)}
        options = OPTIONS | {"storage": OPTIONS["storage"] | place}
        given = {"backend": "file", "environ": environ, "options": options, "ranks": ranks}
        one = Engine(3, 4, **given)
        try:
            assert one.serve("a", [*A, 9]) == (0, 0 if variable else 2)
            one.serve("b", B[:3])
            one.serve("c", B[:2])
        finally:
            one.close()
    assert len([*tmp_path.rglob("*-of-*/*/*/*")]) == 2 * ranks


# -- a worker's host blocks are used by copies and by storage


def metadata(keys, blocks, copies):
    names = [bytes([key] * 32).hex() for key in keys]
    return SimpleNamespace(
        hash_values=names, block_ids=blocks, extra_params={"copies": copies}, timeout=1.0
    )


def copies(sources, targets, keys=()):
    return SimpleNamespace(
        src_block_ids=sources,
        dst_block_ids=targets,
        hash_values=[bytes([key] * 32).hex() for key in keys],
    )


@pytest.fixture
def worker(pool):
    config = make_config(6, 4, backend="mooncake")
    memory = ModelMemory(6, BLOCK_SIZE)
    made = CacheController(config, 0, 0, **GIVEN)
    made.initialize_kv_cache(Attention(memory), 6)
    made.blocks = list(memory.tensors.values())
    for number, tensor in enumerate(made.blocks):
        for block in range(6):
            tensor[block] = 10 * block + number
    yield made
    assert made.free_cache()


def stored(worker, block, key):
    """A device block's bytes are in storage."""
    worker.submit_swap_tasks(copies([block], [3], [key]), None)
    worker.reset_cache()
    assert worker.backup_host_to_storage([3], metadata([key], [3], [])).get_result() == [3]


def loaded(worker, slot):
    """What a host block holds, by tensor."""
    assert worker.submit_swap_tasks(None, copies([slot], [5])).wait_all()
    return [int(tensor[5].flat[0]) for tensor in worker.blocks]


def test_a_read_comes_after_the_copies_that_were_issued_before_it(worker):
    stored(worker, 1, 7)
    task = worker.prefetch_from_storage(metadata([7], [0], [1]))
    assert not task.wait(0.05), "a copy to this host block is on its way"
    worker.submit_swap_tasks(copies([2], [0], [8]), None)
    assert task.get_result() == [0]
    assert loaded(worker, 0) == [10, 11, 12, 13]


def test_a_refused_copy_counts_for_no_read(worker):
    stored(worker, 1, 7)
    with pytest.raises(ValueError, match="block id out of range"):
        worker.submit_swap_tasks(copies([6], [0], [8]), None)
    assert worker.prefetch_from_storage(metadata([7], [0], [0])).get_result() == [0]


def test_a_read_whose_host_block_was_given_to_a_later_copy_fails(worker):
    stored(worker, 1, 7)
    worker.submit_swap_tasks(copies([2], [0], [8]), None)
    task = worker.prefetch_from_storage(metadata([7], [0], [0]))
    assert "given to others" in task.error
    assert loaded(worker, 0) == [20, 21, 22, 23]


@pytest.mark.parametrize("waits", ["read", "write"])
def test_a_copy_waits_until_storage_has_let_go_of_its_host_block(worker, waits):
    stored(worker, 1, 7)
    Faults.mode = "slow"
    if waits == "read":
        task = worker.prefetch_from_storage(metadata([7], [0], [0]))
    else:
        worker.submit_swap_tasks(copies([1], [0], [9]), None)
        task = worker.backup_host_to_storage([0], metadata([9], [0], []))
    worker.submit_swap_tasks(copies([2], [0], [8]), None)
    assert task.is_completed
    assert loaded(worker, 0) == [20, 21, 22, 23]
    again = worker.prefetch_from_storage(metadata([7], [1], [0]))
    assert again.get_result() == [1]
    assert loaded(worker, 1) == [10, 11, 12, 13]


def test_what_waits_for_a_copy_fails_at_the_end(worker):
    task = worker.prefetch_from_storage(metadata([7], [0], [2]))
    assert worker.free_cache()
    assert task.error == "storage is closed"
    with pytest.raises(StoreError, match="closed"):
        task.get_result()


def test_numbers_that_do_not_fit_are_refused(worker):
    with pytest.raises(ValueError, match="1 host blocks and 0 hashes"):
        StorageTask(metadata([], [0], [0]), [0])
    with pytest.raises(ValueError, match="1 host blocks and 0 numbers of copies"):
        worker.prefetch_from_storage(metadata([7], [0], []))
    with pytest.raises(ValueError, match="1 host blocks and 0 hashes"):
        worker.submit_swap_tasks(copies([1], [0]), None)
    assert loaded(worker, 0)[0] == 0xEE, "nothing was copied"


def test_the_objects_are_deleted_on_demand(worker, pool):
    stored(worker, 1, 7)
    assert pool
    assert worker.free_cache(clear_storage=True)
    assert not pool


# -- settings


def test_tensors_of_another_layout_are_refused(pool):
    options = OPTIONS | {"layout": LAYOUT | {"head_dim": 16}}
    config = make_config(6, 4, backend="mooncake")
    worker = CacheController(config, 0, 0, options=options, environ=POOL)
    worker.initialize_kv_cache(Attention(ModelMemory(6, BLOCK_SIZE)), 6)
    with pytest.raises(LayoutError, match=r"layout has Piece.*where the tensors have Piece"):
        worker.submit_swap_tasks(copies([1], [0], [7]), None)


@pytest.mark.parametrize(
    ("cpu", "options", "text"),
    [
        (0, OPTIONS, "num_cpu_blocks is needed"),
        (4, {}, "v1 needs layout for storage and indexes"),
        (4, OPTIONS | {"staging_slots": 2}, "staging_slots has no use"),
        (4, OPTIONS | {"storage": {"on_full": "shed"}}, "storage.on_full has no use"),
        (4, OPTIONS | {"storage": {"url": "file:///mnt"}}, "storage.url has no use"),
    ],
)
def test_settings_that_do_not_fit_are_named(pool, cpu, options, text):
    for make in (CacheManager, lambda config, **given: CacheController(config, 0, 0, **given)):
        with pytest.raises(ConfigError, match=text):
            make(make_config(8, cpu, backend="mooncake"), options=options, environ=POOL)


def test_a_worker_without_storage_refuses_its_calls():
    worker = CacheController(make_config(6, 4), 0, 0, environ={})
    worker.initialize_kv_cache(Attention(ModelMemory(6, BLOCK_SIZE)), 6)
    with pytest.raises(ConfigError, match="there is no storage"):
        worker.prefetch_from_storage(metadata([7], [0], [0]))
    manager = CacheManager(make_config(6, 4), environ={})
    assert not manager.prefetch_storage(Request("a", A))
    assert manager.drain_pending_prefetches() == []
    assert worker.free_cache()
