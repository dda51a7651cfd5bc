"""The parts of SGLang's linker that need no SGLang: settings, pages of the device pool, and their
loads and stores."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvactors import ConfigError, DeviceError
from kvactors.integrations.sglang.pages import NOTHING, DevicePages, PageMoves
from kvactors.integrations.sglang.settings import linker_tier_config, read_linker_settings
from kvactors.tier_cache import CopyWorker, open_tiers
from kvactors.tier_cache.copies import COPY_LIMIT_S
from tests.tier_cache.stores import FaultyStore

PAGE = 16
LIMIT = 30.0
"""Seconds that a wait may take. It only bounds a hang."""
PAGES = 16
FILE = {"backend": "file", "directory": "pages"}


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in numbers]


# -- settings


def test_the_host_memory_must_hold_a_page() -> None:
    def config(host_bytes: int, replica: int = 0, model: str | None = "m", **more: Any) -> Any:
        settings = read_linker_settings({"host_bytes": host_bytes, "storage": FILE, **more})
        facts = {"name": "kv", "kind": "MHATokenToKVPool"}
        sizes = {"page_bytes": PAGE, "replica": replica}
        return linker_tier_config(settings, model, facts, weights="w", **sizes)

    assert config(5 * PAGE + 3).num_slots == 5
    assert config(PAGE, numa_node=3).numa_node == 3
    assert config(PAGE, replica=2).storage.directory == "pages/replica-2"
    with pytest.raises(ConfigError, match="holds no page of 16 bytes"):
        config(PAGE - 1)
    with pytest.raises(ConfigError, match="model is needed"):
        config(PAGE, model=None)


# -- pages of the device pool


class Buffer(np.ndarray):
    """A numpy array with the calls of a torch tensor that are used."""

    def view(self, *shape: Any) -> Any:
        return self.reshape(shape) if isinstance(shape[0], int) else super().view(*shape)

    def stride(self, axis: int) -> int:
        return self.strides[axis] // self.itemsize

    def element_size(self) -> int:
        return self.itemsize


class MHATokenToKVPool:
    """SGLang's device pool: two layers, tokens of one head of two floats."""

    kv_cache_layout, dtype, store_dtype = "nhd", "float32", "float32"
    start_layer, head_num, head_dim, v_head_dim = 0, 1, 2, 2
    k_scale_buffer = None

    def __init__(self, tokens: int = 18) -> None:
        self.k_buffer = [np.zeros((tokens, 1, 2), np.float32).view(Buffer) for _ in range(2)]
        self.v_buffer = [np.zeros((tokens, 1, 2), np.float32).view(Buffer) for _ in range(2)]


def test_pages_of_a_device_pool() -> None:
    pages = DevicePages(MHATokenToKVPool(), 4)
    assert pages.page_bytes == 4 * 4 * 2 * 4
    assert [one.shape for one in pages.tensors] == [(4, 8)] * 4  # two tokens are no page
    assert pages.numbers(np.array([8, 9, 10, 11, 0, 1, 2, 3]), 2) == [2, 0]
    for indices, count in (
        (None, 1),
        (np.arange(3), 1),
        (np.arange(8), 1),
        (np.arange(1, 5), 1),
        (np.array([0, 1, 3, 2]), 1),
    ):
        with pytest.raises(ValueError, match=r"indices"):
            pages.numbers(indices, count)


@pytest.mark.parametrize(
    ("name", "value"), [("kv_cache_layout", "hnd"), ("k_scale_buffer", []), ("k_buffer", [])]
)
def test_a_device_pool_with_pages_of_another_form_is_refused(name: str, value: Any) -> None:
    pool = MHATokenToKVPool()
    setattr(pool, name, value)
    with pytest.raises(ConfigError, match="use KVActorsHiCache"):
        DevicePages(pool, 4)
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        DevicePages(SimpleNamespace(), 4)


# -- loads and stores


class Engine:
    """Device pages, and the moves below them."""

    def __init__(self, slots: int = 8, storage: dict[str, Any] | None = None, **more: Any) -> None:
        config = {"model": "m", "block_bytes": PAGE, "num_slots": slots}
        self.device = np.zeros((PAGES, PAGE), np.uint8)
        self.tiers = open_tiers(config | {"storage": storage or {}})
        self.copies = CopyWorker([self.device], self.tiers.memory)
        self.moves = PageMoves(self.tiers, self.copies, more.get("fetch_wait_s", 30.0))

    def store(self, names: list[bytes], pages: list[int]) -> bool:
        assert self.moves.queue_store(names, pages)
        self.end_stores()
        return self.moves.pop_completed_offload()

    def end_stores(self) -> None:
        """End steps until every store has ended."""
        until = time.monotonic() + LIMIT
        while self.moves.num_completed_offloads() < len(self.moves._stores):
            assert time.monotonic() < until, "a store does not end"

    def load(self, names: list[bytes], pages: list[int]) -> None:
        assert self.moves.find(names) == len(names)
        assert self.moves.queue_load("r", names, pages)
        number = self.moves.start_layer_wise_loading()
        self.moves.set_consumer(number)
        self.moves.wait_until(0)
        assert self.moves.finish_layer_wise_loading(number)

    def drain(self) -> None:
        while self.tiers.has_pending_work():
            self.moves.num_completed_offloads()

    def fill(self, seed: int = 3) -> np.ndarray:
        self.device[:] = np.random.default_rng(seed).integers(1, 255, self.device.shape, np.uint8)
        return self.device.copy()


@pytest.fixture
def faulty() -> Any:
    FaultyStore.mode, FaultyStore.unreadable = "ok", set()
    yield {"backend": f"{FaultyStore.__module__}:{FaultyStore.__name__}"}
    FaultyStore.mode, FaultyStore.unreadable = "ok", set()


def test_pages_come_back_from_host_memory() -> None:
    engine = Engine()
    before = engine.fill()
    assert engine.moves.find(keys(0)) == 0
    assert engine.store(keys(0, 1, 2), [5, 3, 9])
    assert engine.store(keys(0, 1, 2), [5, 3, 9])  # nothing to copy
    assert engine.moves.find(keys(0, 1, 2, 3)) == 3
    assert engine.moves.find(keys(3, 0)) == 0
    engine.load(keys(0, 1, 2), [0, 1, 2])
    assert (engine.device[:3] == before[[5, 3, 9]]).all()
    engine.tiers.check()
    engine.moves.close()
    engine.moves.close()
    assert engine.moves.find(keys(0)) == 0
    assert not engine.moves.queue_store(keys(0), [0])
    assert not engine.moves.queue_load("r", keys(0), [0])
    engine.moves.reset()
    engine.moves.num_completed_offloads()


def test_pages_come_back_from_storage(faulty: Any) -> None:
    engine = Engine(slots=4, storage=faulty)
    before = engine.fill()
    for first in (0, 4, 8):
        assert engine.store(keys(*range(first, first + 4)), list(range(first, first + 4)))
        engine.drain()
    assert engine.moves.find(keys(*range(8))) == 4  # as many as the host tier holds
    engine.load(keys(0, 1, 2, 3), [15, 14, 13, 12])
    assert (engine.device[12:] == before[[3, 2, 1, 0]]).all()
    engine.moves.close()


def test_all_look_ups_of_a_step_share_its_wait(faulty: Any) -> None:
    engine = Engine(slots=4, storage=faulty, fetch_wait_s=0.05)
    engine.fill()
    assert engine.store(keys(0, 1), [0, 1])
    engine.drain()
    engine.moves.reset()
    FaultyStore.mode = "hang"
    assert engine.moves.find(keys(0)) == 0  # on its way
    assert engine.moves._wait_left_s == 0.0
    assert engine.moves.find(keys(1)) == 0
    engine.moves.num_completed_offloads()
    assert engine.moves._wait_left_s == 0.05
    FaultyStore.mode = "ok"
    engine.drain()
    assert engine.moves.find(keys(0, 1)) == 2
    engine.moves.close()


def test_a_page_evicted_after_its_look_up_is_not_loaded() -> None:
    engine = Engine(slots=2)
    engine.fill()
    assert engine.store(keys(0, 1), [0, 1])
    assert engine.moves.find(keys(0, 1)) == 2
    engine.moves.num_completed_offloads()
    assert engine.store(keys(2, 3), [2, 3])
    assert not engine.moves.queue_load("r", keys(0, 1), [4, 5])
    assert engine.moves.start_layer_wise_loading() == NOTHING
    engine.tiers.check()
    engine.moves.close()


def test_pages_of_a_load_are_not_evicted_before_its_end() -> None:
    engine = Engine(slots=2)
    before = engine.fill()
    assert engine.store(keys(0, 1), [0, 1])
    assert engine.moves.find(keys(0, 1)) == 2
    assert engine.moves.queue_load("r", keys(0, 1), [4, 5])
    assert not engine.moves.queue_load("r", keys(0), [6])  # one load of a request at a time
    engine.moves.num_completed_offloads()
    assert engine.moves.queue_store(keys(2), [2])
    assert engine.moves.num_completed_offloads() == 0  # it waits for a slot
    number = engine.moves.start_layer_wise_loading()
    assert engine.moves.finish_layer_wise_loading(number)
    engine.moves.num_completed_offloads()
    assert (engine.device[4:6] == before[:2]).all()
    engine.end_stores()
    assert engine.moves.pop_completed_offload()
    engine.moves.close()


def test_more_pages_than_host_slots_are_stored_in_part_without_storage() -> None:
    engine = Engine(slots=4)
    engine.fill()
    assert not engine.store(keys(*range(10)), list(range(10)))  # to be offered again
    assert engine.moves.find(keys(*range(10))) == 4
    engine.moves.close()


def test_more_pages_than_host_slots_are_all_saved(faulty: Any) -> None:
    engine = Engine(slots=4, storage=faulty | {"on_full_wait_s": LIMIT})
    engine.fill()
    assert engine.store(keys(*range(10)), list(range(10)))
    engine.drain()
    assert engine.tiers.statistics().saved == 10
    engine.moves.close()


def test_a_copy_that_cannot_begin_is_a_failed_load_and_no_store() -> None:
    engine = Engine()
    engine.fill()
    assert engine.store(keys(0), [0])
    assert engine.moves.find(keys(0)) == 1
    assert engine.moves.queue_load("r", keys(0), [PAGES])  # no such page
    assert not engine.moves.finish_layer_wise_loading(engine.moves.start_layer_wise_loading())
    assert not engine.moves.queue_store(keys(1), [PAGES])
    with pytest.raises(LookupError):
        engine.moves.pop_completed_offload()
    assert engine.moves.find(keys(1)) == 0
    engine.load(keys(0), [3])
    engine.tiers.check()
    engine.moves.close()


def test_a_copy_that_fails_is_a_failed_load_and_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.fill()
    assert engine.store(keys(0), [0])
    finished = engine.copies.get_finished
    with monkeypatch.context() as patch:
        patch.setattr(
            engine.copies,
            "get_finished",
            lambda: [ended._replace(error="the GPU is gone") for ended in finished()],
        )
        assert engine.moves.find(keys(0)) == 1
        assert engine.moves.queue_load("r", keys(0), [1])
        number = engine.moves.start_layer_wise_loading()
        assert not engine.moves.finish_layer_wise_loading(number)
        assert not engine.store(keys(1), [1])
    assert engine.moves.find(keys(1)) == 0
    assert engine.store(keys(1), [1])
    engine.load(keys(0, 1), [2, 3])
    engine.tiers.check()
    engine.moves.close()


def test_a_copy_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.fill()
    assert engine.store(keys(0), [0])
    assert engine.moves.find(keys(0)) == 1
    assert engine.moves.queue_load("r", keys(0), [1])
    number = engine.moves.start_layer_wise_loading()
    with monkeypatch.context() as patch:
        patch.setattr(engine.copies, "wait", lambda jobs, limit: False)
        with pytest.raises(DeviceError, match="has not ended"):
            engine.moves.finish_layer_wise_loading(number)
    assert engine.moves.finish_layer_wise_loading(number)
    assert COPY_LIMIT_S > 60
    engine.moves.close()


def test_a_reset_ends_all_moves_and_forgets_the_host_tier(faulty: Any) -> None:
    engine = Engine(storage=faulty)
    before = engine.fill()
    assert engine.store(keys(0, 1), [0, 1])
    engine.drain()
    assert engine.moves.find(keys(0, 1)) == 2
    assert engine.moves.queue_load("queued", keys(0), [4])
    assert engine.moves.queue_load("begun", keys(1), [5])
    engine.moves.cancel_queued_load("queued")
    engine.moves.start_layer_wise_loading()
    assert engine.moves.queue_load("queued", keys(0), [4])
    assert engine.moves.queue_store(keys(2), [2])
    engine.moves.reset()
    assert engine.moves.num_completed_offloads() == 0
    assert engine.moves.start_layer_wise_loading() == NOTHING
    engine.tiers.check()
    engine.load(keys(0, 1), [6, 7])  # from storage
    assert (engine.device[6:8] == before[:2]).all()
    engine.moves.close()


@pytest.mark.parametrize("seed", range(20))
def test_random_moves_bring_the_bytes_that_were_stored(faulty: Any, seed: int) -> None:
    """Chains of pages are stored, loaded, cancelled and reset in an order drawn from the seed. A
    page of key k has the bytes of k wherever it is loaded."""
    draw = random.Random(seed)
    engine = Engine(slots=draw.choice([3, 6]), storage=draw.choice([None, faulty]))
    moves, waiting = engine.moves, []
    for step in range(60):
        chain = keys(*(draw.randrange(4) * 16 + i for i in range(draw.randrange(1, 5))))
        places = draw.sample(range(PAGES), len(chain))
        action = draw.choice(["store", "store", "load", "load", "cancel", "step", "reset"])
        if action == "store" and not waiting:
            for key, page in zip(chain, places, strict=True):
                engine.device[page] = key[0] + 1
            if moves.queue_store(chain, places):
                engine.end_stores()
        elif action == "load" and not waiting:
            count = moves.find(chain)
            if count and moves.queue_load(str(step), chain[:count], places[:count]):
                waiting = list(zip(chain[:count], places, strict=False))
        elif action == "cancel" and waiting:
            assert moves.cancel_queued_load(next(iter(moves._queued)))
            waiting = []
        elif action == "reset" and draw.random() < 0.3:
            moves.reset()
            waiting = []
        elif action == "step":
            number = moves.start_layer_wise_loading()
            assert (number == NOTHING) == (not waiting)
            assert moves.finish_layer_wise_loading(number)
            for key, page in waiting:
                assert (engine.device[page] == key[0] + 1).all()
            waiting = []
            for _ in range(moves.num_completed_offloads()):
                moves.pop_completed_offload()
            moves.num_completed_offloads()
        engine.tiers.check()
    if waiting:
        assert moves.cancel_queued_load(next(iter(moves._queued)))
    assert engine.tiers.copies_in_flight() == ((), ())
    moves.close()
