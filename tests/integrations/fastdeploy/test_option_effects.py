"""Each option of `FastDeployOptions` has its effect, and one without a use is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvactors.errors import ConfigError
from tests.integrations.fastdeploy.config import BLOCK_SIZE
from tests.integrations.fastdeploy.conftest import memory_of_gpu
from tests.integrations.fastdeploy.oracle import ModelMemory
from tests.support.numa import bound_node

LARGE = 1 << 20
"""Bytes of a tensor's row that are copied in a thread, not by the caller."""


def large_memory(blocks: int, ranks: int = 1) -> ModelMemory:
    """Tensors whose rows are `LARGE` bytes, of which the model writes the first ones."""

    def make(shape):
        return np.zeros((shape[0], LARGE), np.uint8)

    return ModelMemory(blocks, BLOCK_SIZE, ranks=ranks, layers=1, make=make)


def threads() -> set[str]:
    """The threads of this process, by number: some of earlier tests may end later."""
    return {one.name for one in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize("node", [None, 0])
def test_host_memory_comes_from_the_node_of_the_option(engine, node):
    one = engine(gpu=4, cpu=2, file=True, options={"numa_node": node})
    assert bound_node(one.manager._cache.lower.memory.address) == node


def test_a_node_that_the_machine_lacks_is_refused_and_nothing_is_open(engine):
    one = engine(gpu=4, cpu=2, attach=False, options={"numa_node": 1022})
    with pytest.raises(ConfigError, match="numa_node is 1022"):
        one.manager.attach()
    assert one.manager._cache.lower is None
    with pytest.raises(ConfigError, match="numa_node is 1022"):
        one.manager.attach()  # the first attempt left nothing attached


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [1, 3])
def test_copies_use_as_many_threads_as_the_option(engine, number, ranks):
    memory = large_memory(4, ranks)
    one = engine(gpu=4, cpu=2, ranks=ranks, memory=memory, options={"copy_threads": number})
    before = threads()
    one.serve("a", list(range(8)))
    one.manager.free_block_ids(2)
    assert one.manager.statistics().cpu_blocks == 2
    assert len(threads() - before) == number * ranks


def test_copying_threads_have_no_use_for_tensors_of_a_gpu(engine, gpu):
    memory = memory_of_gpu(gpu)(4, BLOCK_SIZE)
    one = engine(gpu=4, cpu=2, memory=memory, attach=False, options={"copy_threads": 3})
    with pytest.raises(ConfigError, match="options: copy_threads has no use with tensors of a GPU"):
        one.manager.attach()
    assert one.manager._cache.lower is None
