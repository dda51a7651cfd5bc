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
from kvactors.integrations.sglang.pages import NOTHING, PageMoves, device_pages
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


def test_pools_share_the_host_memory_as_they_share_the_devices() -> None:
    def config(host_bytes: int, replica: int = 0, model: str | None = "m", **more: Any) -> Any:
        settings = read_linker_settings({"host_bytes": host_bytes, "storage": FILE, **more})
        return linker_tier_config(settings, model, pools, replica=replica, weights="w")

    pools = device_pages(MHATokenToKVPool(), None, 4, ["FULL"])
    page = pools["kv"].page_bytes
    assert config(5 * page + 3).num_slots == 5
    assert config(page, numa_node=3).numa_node == 3
    assert config(page, replica=2).storage.directory == "pages/replica-2"
    with pytest.raises(ConfigError, match=f"holds no page of {page} bytes"):
        config(page - 1)
    with pytest.raises(ConfigError, match="model is needed"):
        config(page, model=None)
    plain = config(page)

    pools = device_pages(SWAKVPool(), HybridReqToTokenPool(), 4, ["FULL", "SWA", "MAMBA"])
    assert [one.num_pages for one in pools.values()] == [4, 2, 6]
    device = sum(one.num_pages * one.page_bytes for one in pools.values())
    with pytest.raises(ConfigError, match=r"storage\.capacity_bytes is needed with groups"):
        config(2 * device)
    found = config(2 * device, storage=FILE | {"capacity_bytes": 10 * device})
    assert (found.num_slots, found.fingerprint) == (8, plain.fingerprint)
    assert {name: one.num_slots for name, one in found.groups.items()} == {"swa": 4, "mamba": 12}
    shares = [found.own.storage.capacity_bytes, found.group("swa").storage.capacity_bytes]
    assert shares == [10 * pages * page for pages in (4, 2)]
    assert found.group("swa").fingerprint != plain.fingerprint  # of pages with the same bytes
    with pytest.raises(ConfigError, match="pool 'swa', whose share of the device's memory is"):
        config(device // 4, storage=FILE | {"capacity_bytes": 10 * device})


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


class SWAKVPool:
    """The device pool of a model with windows."""

    def __init__(self) -> None:
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(), MHATokenToKVPool(10)


class State(Buffer):
    """A tensor with the states of every layer and slot."""

    def numel(self) -> int:
        return self.size


class MambaPool:
    """States of three layers, in six slots."""

    num_mamba_layers = 3

    def __init__(self) -> None:
        shapes = [(3, 6, 4, 2), (3, 6, 5), (3, 6, 0)]
        temporal, *conv = (np.zeros(shape, np.float32).view(State) for shape in shapes)
        self.mamba_cache = SimpleNamespace(temporal=temporal, conv=conv)


class HybridReqToTokenPool:
    """SGLang's pool of requests, which has the states."""

    mamba_ckpt_pool = None

    def __init__(self, **more: Any) -> None:
        self.mamba_pool = MambaPool()
        self.short_conv_pool = self.ngram_pool = SimpleNamespace(enabled=False)
        vars(self).update(more)


def test_pages_of_a_device_pool() -> None:
    pages = device_pages(MHATokenToKVPool(), None, 4, ["FULL"])["kv"]
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
    with pytest.raises(ConfigError, match="Use KVActorsHiCache"):
        device_pages(pool, None, 4, ["FULL"])
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        device_pages(SimpleNamespace(), None, 4, ["FULL"])


def test_windows_that_sglangs_tree_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="SWAKVPool without SWA"):
        device_pages(SWAKVPool(), None, 4, ["FULL"])


def test_a_state_of_a_slot_is_a_page() -> None:
    pools = device_pages(SWAKVPool(), HybridReqToTokenPool(), 4, ["FULL", "SWA", "MAMBA"])
    states = pools["mamba"]
    assert [one.shape for one in states.tensors] == [(6, 4, 2)] * 3 + [(6, 5)] * 3
    assert states.page_bytes == 3 * 4 * (8 + 5)
    assert states.numbers(np.array([4]), 1) == [4]
    assert len({str(one.facts) for one in pools.values()}) == 3


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"mamba_ckpt_pool": 1}, "int8 checkpoints"),
        ({"short_conv_pool": SimpleNamespace(enabled=True)}, "short_conv_pool or ngram_pool"),
    ],
)
def test_states_of_another_form_are_refused(more: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        device_pages(SWAKVPool(), HybridReqToTokenPool(**more), 4, ["FULL", "SWA", "MAMBA"])
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        device_pages(SWAKVPool(), SimpleNamespace(), 4, ["FULL", "SWA", "MAMBA"])


# -- loads and stores


SIZES = {"kv": PAGE, "swa": 24, "mamba": 80}
"""Bytes of a page of each pool."""


class Engine:
    """Device pages, and the moves below them. `groups`: host slots of further pools."""

    def __init__(
        self,
        slots: int = 8,
        storage: dict[str, Any] | None = None,
        groups: dict[str, int] | None = None,
        **more: Any,
    ) -> None:
        table = {
            "model": "m",
            "block_bytes": PAGE,
            "num_slots": slots,
            "storage": storage or {},
            "groups": {
                name: {"block_bytes": SIZES[name], "num_slots": count}
                for name, count in (groups or {}).items()
            },
        }
        self.tiers = open_tiers(table)
        caches = {"kv": self.tiers, **self.tiers.groups}
        self.devices = {name: np.zeros((PAGES, SIZES[name]), np.uint8) for name in caches}
        self.device = self.devices["kv"]
        self.copies = {
            name: CopyWorker([self.devices[name]], cache.memory) for name, cache in caches.items()
        }
        self.moves = PageMoves(self.tiers, self.copies, more.get("fetch_wait_s", 30.0))

    def find(self, names: list[bytes], **windows: int) -> int:
        return self.moves.find(names, windows)

    def queue_load(self, request: str, names: list[bytes], pages: list[int]) -> bool:
        return self.moves.queue_load(request, {"kv": (names, pages)})

    def queue_store(self, names: list[bytes], pages: list[int], **others: Any) -> bool:
        return self.moves.queue_store({"kv": (names, pages), **others})

    def store(self, names: list[bytes], pages: list[int], **others: Any) -> bool:
        assert self.queue_store(names, pages, **others)
        self.end_stores()
        return self.moves.pop_completed_offload()

    def end_stores(self) -> None:
        """End steps until every store has ended."""
        until = time.monotonic() + LIMIT
        while self.moves.num_completed_offloads() < len(self.moves._stores):
            assert time.monotonic() < until, "a store does not end"

    def load(self, names: list[bytes], pages: list[int], **others: Any) -> None:
        windows = {name: len(places[0]) for name, places in others.items()}
        assert self.moves.find(names, windows) == len(names)
        assert self.moves.queue_load("r", {"kv": (names, pages), **others})
        number = self.moves.start_layer_wise_loading()
        self.moves.set_consumer(number)
        self.moves.wait_until(0)
        assert self.moves.finish_layer_wise_loading(number)

    def drain(self) -> None:
        while self.tiers.has_pending_work():
            self.moves.num_completed_offloads()

    def fill(self, seed: int = 3) -> np.ndarray:
        draw = np.random.default_rng(seed)
        for device in self.devices.values():
            device[:] = draw.integers(1, 255, device.shape, np.uint8)
        return self.device.copy()


@pytest.fixture
def faulty() -> Any:
    FaultyStore.mode, FaultyStore.unreadable = "ok", set()
    yield {"backend": f"{FaultyStore.__module__}:{FaultyStore.__name__}"}
    FaultyStore.mode, FaultyStore.unreadable = "ok", set()


def test_pages_come_back_from_host_memory() -> None:
    engine = Engine()
    before = engine.fill()
    assert engine.find(keys(0)) == 0
    assert engine.store(keys(0, 1, 2), [5, 3, 9])
    assert engine.store(keys(0, 1, 2), [5, 3, 9])  # nothing to copy
    assert engine.find(keys(0, 1, 2, 3)) == 3
    assert engine.find(keys(3, 0)) == 0
    engine.load(keys(0, 1, 2), [0, 1, 2])
    assert (engine.device[:3] == before[[5, 3, 9]]).all()
    engine.tiers.check()
    engine.moves.close()
    engine.moves.close()
    assert engine.find(keys(0)) == 0
    assert not engine.queue_store(keys(0), [0])
    assert not engine.queue_load("r", keys(0), [0])
    engine.moves.reset()
    engine.moves.num_completed_offloads()


def test_pages_come_back_from_storage(faulty: Any) -> None:
    engine = Engine(slots=4, storage=faulty)
    before = engine.fill()
    for first in (0, 4, 8):
        assert engine.store(keys(*range(first, first + 4)), list(range(first, first + 4)))
        engine.drain()
    assert engine.find(keys(*range(8))) == 4  # as many as the host tier holds
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
    assert engine.find(keys(0)) == 0  # on its way
    assert engine.moves._wait_left_s == 0.0
    assert engine.find(keys(1)) == 0
    engine.moves.num_completed_offloads()
    assert engine.moves._wait_left_s == 0.05
    FaultyStore.mode = "ok"
    engine.drain()
    assert engine.find(keys(0, 1)) == 2
    engine.moves.close()


def test_a_page_evicted_after_its_look_up_is_not_loaded() -> None:
    engine = Engine(slots=2)
    engine.fill()
    assert engine.store(keys(0, 1), [0, 1])
    assert engine.find(keys(0, 1)) == 2
    engine.moves.num_completed_offloads()
    assert engine.store(keys(2, 3), [2, 3])
    assert not engine.queue_load("r", keys(0, 1), [4, 5])
    assert engine.moves.start_layer_wise_loading() == NOTHING
    engine.tiers.check()
    engine.moves.close()


def test_pages_of_a_load_are_not_evicted_before_its_end() -> None:
    engine = Engine(slots=2)
    before = engine.fill()
    assert engine.store(keys(0, 1), [0, 1])
    assert engine.find(keys(0, 1)) == 2
    assert engine.queue_load("r", keys(0, 1), [4, 5])
    assert not engine.queue_load("r", keys(0), [6])  # one load of a request at a time
    engine.moves.num_completed_offloads()
    assert engine.queue_store(keys(2), [2])
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
    assert engine.find(keys(*range(10))) == 4
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
    assert engine.find(keys(0)) == 1
    assert engine.queue_load("r", keys(0), [PAGES])  # no such page
    assert not engine.moves.finish_layer_wise_loading(engine.moves.start_layer_wise_loading())
    assert not engine.queue_store(keys(1), [PAGES])
    with pytest.raises(LookupError):
        engine.moves.pop_completed_offload()
    assert engine.find(keys(1)) == 0
    engine.load(keys(0), [3])
    engine.tiers.check()
    engine.moves.close()


def test_a_copy_that_fails_is_a_failed_load_and_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.fill()
    assert engine.store(keys(0), [0])
    copies = engine.copies["kv"]
    finished = copies.get_finished
    with monkeypatch.context() as patch:
        patch.setattr(
            copies,
            "get_finished",
            lambda: [ended._replace(error="the GPU is gone") for ended in finished()],
        )
        assert engine.find(keys(0)) == 1
        assert engine.queue_load("r", keys(0), [1])
        number = engine.moves.start_layer_wise_loading()
        assert not engine.moves.finish_layer_wise_loading(number)
        assert not engine.store(keys(1), [1])
    assert engine.find(keys(1)) == 0
    assert engine.store(keys(1), [1])
    engine.load(keys(0, 1), [2, 3])
    engine.tiers.check()
    engine.moves.close()


def test_a_copy_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.fill()
    assert engine.store(keys(0), [0])
    assert engine.find(keys(0)) == 1
    assert engine.queue_load("r", keys(0), [1])
    number = engine.moves.start_layer_wise_loading()
    with monkeypatch.context() as patch:
        patch.setattr(engine.copies["kv"], "wait", lambda jobs, limit: False)
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
    assert engine.find(keys(0, 1)) == 2
    assert engine.queue_load("queued", keys(0), [4])
    assert engine.queue_load("begun", keys(1), [5])
    engine.moves.cancel_queued_load("queued")
    engine.moves.start_layer_wise_loading()
    assert engine.queue_load("queued", keys(0), [4])
    assert engine.queue_store(keys(2), [2])
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
    windows = draw.choice([{}, {"swa": 2, "mamba": 1}])
    branches = 2 if windows else 4
    engine = Engine(
        slots=draw.choice([3, 6]),
        storage=draw.choice([None, faulty]),
        groups=dict.fromkeys(windows, draw.choice([2, 4])),
    )
    moves, waiting = engine.moves, {}

    def last(chain: list[bytes], places: list[int]) -> dict[str, Any]:
        """The pages of a chain that each pool needs."""
        needed = {"kv": len(chain), **windows}
        return {name: (chain[-some:], places[-some:]) for name, some in needed.items()}

    for step in range(60):
        chain = keys(*(draw.randrange(branches) * 16 + i for i in range(draw.randrange(1, 5))))
        places = draw.sample(range(PAGES), len(chain))
        action = draw.choice(["store", "store", "load", "load", "cancel", "step", "reset"])
        if action == "store" and not waiting:
            for key, page in zip(chain, places, strict=True):
                for device in engine.devices.values():
                    device[page] = key[0] + 1
            stored = last(chain, places)
            if windows and draw.random() < 0.5:
                del stored["mamba"]  # a node without a state
            if moves.queue_store(stored):
                engine.end_stores()
        elif action == "load" and not waiting:
            count = moves.find(chain, windows)
            found = last(chain[:count], places[:count])
            if count and moves.queue_load(str(step), found):
                waiting = found
        elif action == "cancel" and waiting:
            assert moves.cancel_queued_load(next(iter(moves._queued)))
            waiting = {}
        elif action == "reset" and draw.random() < 0.3:
            moves.reset()
            waiting = {}
        elif action == "step":
            for device in engine.devices.values():
                device[:] = 0
            number = moves.start_layer_wise_loading()
            assert (number == NOTHING) == (not waiting)
            assert moves.finish_layer_wise_loading(number)
            for name, found in waiting.items():
                for key, page in zip(*found, strict=True):
                    assert (engine.devices[name][page] == key[0] + 1).all()
            waiting = {}
            for _ in range(moves.num_completed_offloads()):
                moves.pop_completed_offload()
            moves.num_completed_offloads()
        engine.tiers.check()
    if waiting:
        assert moves.cancel_queued_load(next(iter(moves._queued)))
    for cache in (engine.tiers, *engine.tiers.groups.values()):
        assert cache.copies_in_flight() == ((), ())
    moves.close()


# -- several pools


HYBRID = {"swa": 8, "mamba": 4}
"""Host slots of two further pools."""
WINDOWS = {"swa": 2, "mamba": 1}


def test_a_prefix_is_found_where_every_pool_has_what_it_needs() -> None:
    engine = Engine(groups=HYBRID)
    engine.fill()
    chain = keys(*range(6))
    assert engine.store(chain, [*range(6)], swa=(chain[2:], [2, 3, 4, 5]))
    assert engine.find(chain, swa=2) == 6
    assert engine.find(chain[:3], swa=2) == 0  # page 1 of the window is not there
    assert engine.find(chain, **WINDOWS) == 0  # no state
    assert engine.store(chain[:4], [*range(4)], mamba=(chain[3:4], [9]))
    assert engine.find(chain, **WINDOWS) == 4
    assert engine.store(chain, [*range(6)], mamba=(chain[5:], [11]))
    assert engine.find(chain, **WINDOWS) == 6
    before = {name: device.copy() for name, device in engine.devices.items()}
    swa, mamba = (chain[2:4], [12, 13]), (chain[3:4], [14])
    engine.load(chain[:4], [6, 7, 8, 9], swa=swa, mamba=mamba)
    assert (engine.devices["kv"][6:10] == before["kv"][:4]).all()
    assert (engine.devices["swa"][12:14] == before["swa"][2:4]).all()
    assert (engine.devices["mamba"][14] == before["mamba"][9]).all()
    engine.moves.close()


def test_only_the_window_and_the_state_of_the_prefix_are_fetched(faulty: Any) -> None:
    engine = Engine(storage=faulty, groups=HYBRID)
    engine.fill()
    chain = keys(*range(6))
    states = {"mamba": (chain[1::2], [1, 3, 5])}
    assert engine.store(chain, [*range(6)], swa=(chain, [*range(6)]), **states)
    engine.drain()
    engine.moves.reset()
    assert engine.find(chain, **WINDOWS) == 6
    fetched = {name: cache.statistics().fetched for name, cache in engine.tiers.groups.items()}
    assert fetched == {"swa": 2, "mamba": 1}
    assert engine.tiers.statistics().fetched == 6
    engine.moves.close()


def test_a_state_that_cannot_be_read_makes_the_prefix_shorter(faulty: Any) -> None:
    engine = Engine(storage=faulty, groups=HYBRID)
    engine.fill()
    chain = keys(*range(6))
    assert engine.store(chain, [*range(6)], mamba=(chain[1::2], [1, 3, 5]))
    engine.drain()
    engine.moves.reset()
    storage = engine.tiers.groups["mamba"]._storage
    FaultyStore.unreadable = {storage.name_of(chain[5])}
    assert engine.find(chain, mamba=1) == 4
    engine.moves.close()


def test_a_load_takes_pages_of_all_pools_or_of_none() -> None:
    engine = Engine(groups={"mamba": 1})
    engine.fill()
    assert engine.store(keys(0), [0], mamba=(keys(0), [0]))
    assert engine.find(keys(0), mamba=1) == 1
    engine.moves.num_completed_offloads()
    assert engine.store(keys(1), [1], mamba=(keys(1), [1]))  # evicts the state
    both = {"kv": (keys(0), [2]), "mamba": (keys(0), [2])}
    assert not engine.moves.queue_load("r", both)
    assert engine.tiers.copies_in_flight() == ((), ())
    assert engine.find(keys(0), mamba=1) == 0
    assert engine.find(keys(1), mamba=1) == 1
    engine.moves.close()


def test_the_last_pages_of_a_window_get_the_slots_and_leave_last() -> None:
    engine = Engine(groups={"swa": 2})
    engine.fill()
    chain = keys(*range(4))
    assert not engine.store(chain, [*range(4)], swa=(chain, [*range(4)]))
    assert engine.find(chain, swa=2) == 4
    assert engine.store(keys(9), [9], swa=(keys(9), [9]))
    assert engine.find(chain, swa=2) == 0
    assert engine.find(chain, swa=1) == 4
    engine.moves.close()


def test_a_copy_that_fails_in_one_pool_fails_the_load_and_the_store() -> None:
    engine = Engine(groups={"mamba": 2})
    engine.fill()
    assert engine.store(keys(0), [0], mamba=(keys(0), [0]))
    assert not engine.store(keys(1), [1], mamba=(keys(1), [PAGES]))  # no such page
    assert engine.find(keys(0), mamba=1) == 1
    assert engine.moves.queue_load("r", {"kv": (keys(0), [2]), "mamba": (keys(0), [PAGES])})
    assert not engine.moves.finish_layer_wise_loading(engine.moves.start_layer_wise_loading())
    for cache in (engine.tiers, *engine.tiers.groups.values()):
        assert cache.copies_in_flight() == ((), ())
    engine.moves.close()
