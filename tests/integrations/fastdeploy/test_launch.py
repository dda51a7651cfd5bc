"""The launch: FastDeploy's signals, its tensors, and what a launch refuses."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from threading import Timer

import numpy as np
import pytest

from kvactors.errors import CacheClosed, ConfigError, DeadlineExceeded, LayoutError, StoreError
from kvactors.integrations.fastdeploy.engine_signals import (
    CLEARED,
    CLEARING,
    FOLDER,
    NORMAL,
    UPDATING,
    SharedSignal,
)
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request
from tests.integrations.fastdeploy.oracle import ModelMemory
from tests.support import attentionstore_sdk as stand_in

ENGINE = ("cache_ready_signal", "swap_space_ready_signal", "cache_transfer_inited_signal")


class EngineProcess:
    """The signals that FastDeploy's engine makes."""

    def __init__(self, ranks: int) -> None:
        self.port = f"kvactors-test-{os.getpid()}"
        self.signals = {name: SharedSignal(name, self.port, ranks, create=True) for name in ENGINE}
        self.signals["prefix_tree_status"] = SharedSignal(
            "prefix_tree_status", self.port, 1, create=True
        )

    def launch(self, one, ranks=1, create=False, devices=None):
        devices = list(range(ranks)) if devices is None else devices
        return one.manager.launch_cache_manager(
            cache_config=one.config.cache_config,
            tensor_parallel_size=ranks,
            device_ids=devices,
            pod_ip="127.0.0.1",
            engine_worker_queue_port=self.port,
            ipc_suffix=None,
            create_cache_tensor=create,
        )

    def value(self, name):
        return self.signals[name].value.tolist()

    def close(self):
        for signal in self.signals.values():
            signal.clear()


@pytest.fixture(params=[1, 2])
def process(request):
    made = EngineProcess(request.param)
    made.ranks = request.param
    made.signals["cache_ready_signal"].value[:] = 1
    yield made
    made.close()


def test_a_launch_opens_the_tiers_and_sets_the_signals(engine, process):
    one = engine(gpu=4, cpu=2, ranks=process.ranks, attach=False)
    assert process.launch(one, process.ranks) == []
    assert process.value("swap_space_ready_signal") == [1] * process.ranks
    assert process.value("cache_transfer_inited_signal") == [1] * process.ranks
    assert one.manager.shm_cache_task_flag_broadcast.value.tolist() == [0]
    assert one.manager.cache_task_inflight_signal.value.tolist() == [0] * process.ranks
    one.serve("a", list(range(8)))
    one.manager.free_block_ids(2)
    assert one.match(Request("b", list(range(8))))[1] == 8
    one.manager.close()
    assert not (FOLDER / f"cache_task_inflight.{process.port}").exists()


@pytest.mark.parametrize("closes", [False, True])
def test_an_engine_leaves_through_fastdeploys_exit(engine, process, closes):
    """`_exit_sub_services` of the engine services clears two signals, and ends the processes that
    the launch has returned."""
    one = engine(gpu=4, cpu=2, ranks=process.ranks, attach=False)
    assert process.launch(one, process.ranks) == []
    assert one.manager.cache_task_queue is None
    if closes:
        one.manager.close()
    one.manager.shm_cache_task_flag_broadcast.clear()
    one.manager.cache_ready_signal.clear()
    process.close()
    one.manager.close()
    assert not list(FOLDER.glob(f"*.{process.port}"))


def test_the_tensors_come_when_the_workers_have_made_them(engine, process):
    calls = []
    memory = ModelMemory(4, BLOCK_SIZE, ranks=process.ranks)
    one = engine(gpu=4, cpu=2, ranks=process.ranks, attach=False, memory=memory)
    one.manager._named = lambda: calls.append(1) or memory.tensors
    assert not calls
    process.launch(one, process.ranks)
    assert calls == [1]
    assert one.manager.num_cpu_blocks == 2


def test_a_launch_takes_over_the_blocks_that_fastdeploy_has_counted(engine, process):
    memory = ModelMemory(6, BLOCK_SIZE, ranks=process.ranks)
    one = engine(gpu=0, cpu=2, ranks=process.ranks, attach=False, memory=memory)
    one.config.cache_config.total_block_num = 6
    process.launch(one, process.ranks)
    assert one.manager.num_gpu_blocks == 6
    one.config.cache_config.total_block_num = 7
    with pytest.raises(LayoutError, match="total_block_num is 7, and the cache tensors have 6"):
        one.manager.update_cache_config(one.config.cache_config)
    assert one.manager.num_gpu_blocks == 6


def test_a_second_launch_is_refused_and_the_first_one_goes_on(engine, process):
    one = engine(gpu=4, cpu=2, ranks=process.ranks, attach=False)
    process.launch(one, process.ranks)
    with pytest.raises(ConfigError, match="launched already"):
        process.launch(one, process.ranks)
    assert (FOLDER / f"cache_task_inflight.{process.port}").exists()
    one.serve("a", list(range(8)))
    one.manager.close()
    assert not (FOLDER / f"cache_task_inflight.{process.port}").exists()


def test_a_launch_without_ready_workers_ends(engine, process):
    process.signals["cache_ready_signal"].value[0] = 0
    options = {"launch_timeout_s": 0.01}
    one = engine(gpu=4, cpu=2, ranks=process.ranks, attach=False, options=options)
    with pytest.raises(DeadlineExceeded, match=f"{process.ranks - 1} of {process.ranks} ranks"):
        process.launch(one, process.ranks)
    process.signals["cache_ready_signal"].value[0] = 1
    process.launch(one, process.ranks)


def test_a_missing_signal_is_named(engine, process):
    one = engine(gpu=4, ranks=process.ranks, attach=False)
    process.signals["prefix_tree_status"].clear()
    with pytest.raises(StoreError, match=r"signal 'prefix_tree_status\.kvactors-test"):
        process.launch(one, process.ranks)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"create": True}, "create_cache_tensor must be false"),
        ({"ranks": 3}, "tensor_parallel_size is 3 with 3 devices"),
        ({"devices": []}, "with 0 devices"),
    ],
)
def test_a_launch_that_cannot_be_honoured_is_refused(engine, process, arguments, text):
    one = engine(gpu=4, cpu=2, ranks=process.ranks, attach=False)
    with pytest.raises(ConfigError, match=text):
        process.launch(one, **{"ranks": process.ranks, **arguments})
    process.launch(one, process.ranks)


def test_tiers_need_tensors_and_a_manager_without_tiers_does_not(engine):
    for cpu, text in ((2, "need the cache tensors: give PrefixCacheManager tensors="), (0, None)):
        one = engine(gpu=4, cpu=cpu, attach=False)
        one.manager._named = None
        expected = pytest.raises(ConfigError, match=text) if text else nullcontext()
        with expected:
            one.manager.attach()
        one.serve("a", list(range(8)))


@pytest.mark.parametrize("backend", [None, "attention_store"])
def test_tensors_of_too_few_blocks_are_refused(engine, backend):
    """AttentionStore computes addresses from block numbers, so it would use memory beyond them."""
    stand_in.reset()
    memory, options = ModelMemory(3, BLOCK_SIZE), {}
    if backend is not None:
        options = {"attention_store": {"sdk": "tests.support.attentionstore_sdk"}}
    cpu = 0 if backend else 2
    one = engine(gpu=4, cpu=cpu, attach=False, memory=memory, backend=backend, options=options)
    with pytest.raises(LayoutError, match="total_block_num is 4, and the cache tensors have 3"):
        one.manager.attach()
    memory.tensors.update(ModelMemory(4, BLOCK_SIZE).tensors)
    one.manager.attach()
    one.config.cache_config.total_block_num = 5
    with pytest.raises(LayoutError, match="total_block_num is 5, and the cache tensors have 4"):
        one.manager.update_cache_config(one.config.cache_config)


def test_tensors_of_another_number_of_ranks_are_refused(engine):
    one = engine(gpu=4, cpu=2, attach=False, memory=ModelMemory(4, BLOCK_SIZE, ranks=2))
    with pytest.raises(LayoutError, match="of 2 ranks, and tensor_parallel_size is 1"):
        one.manager.attach()


def test_tensors_are_attached_once_and_before_the_first_request(engine):
    one = engine(gpu=4, cpu=2)
    with pytest.raises(ConfigError, match="attached already"):
        one.manager.attach()
    other = engine(gpu=4, cpu=2, attach=False)
    other.manager.allocate_gpu_blocks(1, "a")
    with pytest.raises(ConfigError, match="blocks are in use"):
        other.manager.attach()
    other.manager.close()
    with pytest.raises(CacheClosed):
        other.manager.attach()


def test_the_status_asks_for_a_reset_and_is_answered(engine, process):
    one = engine(gpu=4, cpu=2, ranks=process.ranks, attach=False)
    process.launch(one, process.ranks)
    request = Request("a", list(range(8)))
    one.prefill(request)
    status = process.signals["prefix_tree_status"].value
    one.manager.serve_status()
    assert one.free_blocks == [2, 3], "a normal status changes nothing"
    status[0] = CLEARING
    one.manager.serve_status()
    assert status[0] == CLEARED
    assert one.free_blocks == [0, 1, 2, 3]
    one.manager.update_cache_blocks(request, BLOCK_SIZE, 8)  # of before: no error now
    one.free(request)
    status[0] = UPDATING
    one.manager.serve_status()
    assert status[0] == NORMAL
    with pytest.raises(LookupError):
        one.manager.update_cache_blocks(request, BLOCK_SIZE, 8)


def test_a_signal_is_the_one_of_fastdeploy():
    made = SharedSignal("kvactors_test", os.getpid(), 3, create=True)
    other = SharedSignal("kvactors_test", os.getpid(), 3, create=False)
    made.value[:] = [1, -2, 3]
    assert other.value.tolist() == [1, -2, 3]
    found = (FOLDER / f"kvactors_test.{os.getpid()}").read_bytes()
    assert np.frombuffer(found, np.int32).tolist() == [1, -2, 3]
    other.clear()
    made.clear()
    assert not (FOLDER / f"kvactors_test.{os.getpid()}").exists()


@pytest.mark.parametrize("process", [1], indirect=True)
def test_a_wait_for_storage_ends_when_the_status_is_normal_no_more(engine, process, shared):
    prompt = list(range(12))
    options = {"fetch_wait_s": 30.0, "storage": {"timeout_s": 600.0, "close_timeout_s": 0.1}}
    one = engine(gpu=6, cpu=2, file=True, attach=False, options=options)
    process.launch(one)
    engine(gpu=6, file=True).serve("a", prompt)
    shared.mode = "hang"
    status = process.signals["prefix_tree_status"].value

    def clear() -> None:
        status[0] = CLEARING

    timer = Timer(0.05, clear)
    timer.start()
    begun = time.monotonic()
    assert one.match(Request("b", prompt))[1] == 0
    assert time.monotonic() - begun < 20, "the wait went on"
    timer.join()
    shared.mode = "ok"
    status[0] = NORMAL
    assert one.match(Request("c", prompt))[1] == 12
