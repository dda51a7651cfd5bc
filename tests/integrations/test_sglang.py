"""The parts of the SGLang adapter that need no SGLang: settings, identity, prefixes, and the store
of pages."""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvactors import ConfigError
from kvactors.integrations.page_store import PageRegion, PageStore
from kvactors.integrations.sglang.pages import HostPages, find_prefixes
from kvactors.integrations.sglang.settings import (
    LINKER_WHERE,
    WHERE,
    check_shared,
    is_replicated,
    place,
    read_linker_settings,
    read_settings,
    stored_share,
    tier_config,
)
from kvactors.tier_cache import TierStorage, open_storage
from tests.tier_cache.stores import FaultyStore, SharedStore

FILE = {"backend": "file", "directory": "pages"}
FACTS = {"name": "kv", "kind": "MHATokenToKVPoolHost", "layout": "page_first", "regions": "8,8"}
PAGE = 16
KEYS = [bytes([i]) * 32 for i in range(6)]


class Config(msgspec.Struct):
    """SGLang's `HiCacheStorageConfig`, as far as it is read."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False
    should_split_heads: bool = False
    model_name: str | None = "model"


# -- settings


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        (None, "storage is missing"),
        ({"storage": FILE, "directory": "x"}, "unknown key 'directory'"),
        ({"storage": FILE, "interface_v1": 0}, "interface_v1 must be 1, not 0"),
        ({"storage": FILE | {"path": "x"}}, "unknown key 'storage.path'"),
        ({"storage": {}}, "storage.backend is needed"),
        ({"storage": {"backend": "file"}}, "storage.directory is needed"),
        ({"storage": FILE | {"rank": 1, "ranks": 2}}, "those of SGLang's workers"),
        ({"storage": FILE | {"write_policy": "none"}}, "storage.write_policy has no effect"),
        ({"storage": FILE | {"timeout_s": "long"}}, "storage.timeout_s must be a number"),
        ({"host_bytes": 100, "directory": "x"}, "unknown key 'directory'"),
        ({"host_bytes": "many"}, "host_bytes must be a size"),
        ({"host_bytes": 100, "storage": {"backend": "file"}}, "storage.directory is needed"),
        ({"host_bytes": 100, "storage": FILE | {"rank": 1, "ranks": 2}}, "SGLang's workers"),
        ({"host_bytes": 100, "eviction_policy": "newest"}, "unknown eviction_policy 'newest'"),
        ({"host_bytes": 100, "numa_node": -1}, "numa_node"),
        ({"host_bytes": 100, "fetch_wait_s": -1}, "fetch_wait_s must be at least 0"),
    ],
)
def test_a_bad_setting_is_named(extra: Any, error: str) -> None:
    linker = "host_bytes" in (extra or {})
    read = read_linker_settings if linker else read_settings
    with pytest.raises(ConfigError, match=error) as found:
        read(extra)
    assert (LINKER_WHERE if linker else WHERE) in str(found.value)


def config_of(
    config: Config | None = None,
    extra: Any = None,
    facts: Any = None,
    replica: int = 0,
    weights: str = "w",
) -> Any:
    return tier_config(
        read_settings({"storage": FILE, "interface_v1": 1} | (extra or {})),
        config or Config(),
        FACTS | (facts or {}),
        page_bytes=PAGE,
        pages=None,
        replica=replica,
        weights=weights,
    )


def identity_of(found: Any) -> tuple[Any, ...]:
    storage = found.storage
    return (found.model, found.fingerprint, storage.namespace, storage.rank, storage.ranks)


def test_every_fact_of_a_page_is_part_of_its_identity() -> None:
    others = [
        config_of(Config(tp_size=2)),
        config_of(Config(tp_size=2, tp_rank=1)),
        config_of(Config(pp_size=2)),
        config_of(Config(pp_size=2, pp_rank=1)),
        config_of(Config(attn_cp_size=2)),
        config_of(Config(attn_cp_size=2, attn_cp_rank=1)),
        config_of(Config(dcp_size=2)),
        config_of(Config(dcp_size=2, dcp_rank=1)),
        config_of(Config(should_split_heads=True)),
        config_of(Config(model_name="other")),
        config_of(extra={"model": "named"}),
        config_of(weights="other"),
        config_of(extra={"storage": FILE | {"namespace": "n"}}),
        *(config_of(facts={name: "other"}) for name in FACTS),
    ]
    identities = [identity_of(one) for one in [config_of(), *others]]
    assert len(set(identities)) == len(identities)
    assert identity_of(config_of()) == identities[0]


def test_replicas_and_pools_have_separate_folders() -> None:
    folders = [
        config_of(facts={"name": name}, replica=replica).storage.directory
        for name in ("kv", "mamba")
        for replica in (0, 1)
    ]
    assert folders == ["pages", "pages/replica-1", "pages/pool-mamba", "pages/replica-1/pool-mamba"]


def test_ranks_are_distinct_and_replicated_pages_have_one_writer() -> None:
    all_ranks = itertools.product(range(2), range(3), range(4))
    configs = [
        Config(pp_rank=pp, pp_size=2, attn_cp_rank=cp, attn_cp_size=3, tp_rank=tp, tp_size=4)
        for pp, cp, tp in all_ranks
    ]
    assert {place(one, replicated=False) for one in configs} == {(i, 24) for i in range(24)}
    assert {place(one, replicated=True) for one in configs} == {(i, 6) for i in range(6)}
    latent = Config(is_mla_model=True, tp_size=2)
    assert is_replicated(latent, "MLATokenToKVPoolHost")
    assert not is_replicated(latent, "MambaPoolHost")
    assert not is_replicated(latent, "MHATokenToKVPoolHost")
    assert not is_replicated(Config(tp_size=2), "MLATokenToKVPoolHost")
    facts = {"kind": "MLATokenToKVPoolHost"}
    one, other = (
        config_of(Config(is_mla_model=True, tp_size=2, tp_rank=rank), facts=facts)
        for rank in range(2)
    )
    assert identity_of(one) == identity_of(other)


def test_ranks_that_share_pages_need_a_shared_store() -> None:
    storage = TierStorage(**FILE)
    check_shared(storage, Config(tp_size=2))
    check_shared(storage, Config(is_mla_model=True))
    with pytest.raises(ConfigError, match="belongs to one process"):
        check_shared(storage, Config(is_mla_model=True, tp_size=2))


def test_pools_share_a_capacity_as_they_share_host_memory() -> None:
    def share(pools: dict[str, Any], **capacity: Any) -> float | None:
        return stored_share(TierStorage(**FILE, **capacity), pools)

    sizes = {"kv": (20, 100), "mamba": (5, 400)}
    both = {
        name: SimpleNamespace(num_pages=pages, page_bytes=page_bytes)
        for name, (pages, page_bytes) in sizes.items()
    }
    assert share({"kv": both["kv"]}) is None
    assert share(both, capacity_bytes=8000) == 2.0  # 40 pages and 10 states
    assert share(both, capacity_bytes=8000, capacity_blocks=30) == 1.5
    assert share(both, capacity_blocks=60) == 3.0
    with pytest.raises(ConfigError, match="is needed for a model with several pools"):
        share(both)
    with pytest.raises(ConfigError, match="hold no page of pool 'mamba'"):
        share(both, capacity_bytes=799)


# -- prefixes


def test_prefixes_are_those_that_every_pool_allows() -> None:
    """All states of five pages in two pools, against the definition."""
    flags = list(itertools.product((False, True), repeat=5))
    for has, windowed, trailing in itertools.product(flags, flags, (1, 2)):
        pools = [(has, 5), (windowed, trailing)]
        allowed = [
            length
            for length in range(1, 6)
            if all(has[:length]) and all(windowed[max(0, length - trailing) : length])
        ]
        found = find_prefixes(5, pools)
        assert (found.restorable, found.longest) == (allowed, max(allowed, default=0))


# -- pages of a host pool


class HostPool:
    """A host pool with keys and values apart."""

    layout, dtype, page_size, layer_num = "page_first", "float32", 2, 1

    def __init__(self, pages: int = 8) -> None:
        self.memory = np.arange(2 * pages * PAGE // 2, dtype=np.uint8).reshape(2, pages, PAGE // 2)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        pages = [int(index) // self.page_size for index in indices[:: self.page_size]]
        addresses = [part[page].ctypes.data for page in pages for part in self.memory]
        return addresses, [PAGE // 2] * len(addresses)


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(arange=np.arange))


@pytest.mark.usefixtures("_torch")
def test_a_page_is_all_regions_of_its_pool() -> None:
    pool = HostPool()
    pages = HostPages("kv", pool)
    assert (pages.page_tokens, pages.page_bytes) == (2, PAGE)
    (found,) = pages.regions(np.arange(6, 8), 1)
    read = b"".join(ctypes.string_at(region.address, region.nbytes) for region in found)
    assert read == pool.memory[:, 3].tobytes()
    for indices, count in ((np.arange(3), 1), (np.arange(2), 2), (None, 1)):
        with pytest.raises(ValueError, match="indices of"):
            pages.regions(indices, count)


@pytest.mark.usefixtures("_torch")
def test_a_pool_without_addresses_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives no addresses"):
        HostPages("kv", SimpleNamespace(page_size=2, layout="other"))
    empty = SimpleNamespace(page_size=2, get_page_buffer_meta=lambda indices: None)
    with pytest.raises(ConfigError, match="keeps no bytes"):
        HostPages("kv", empty)


# -- the store of pages


class Memory:
    """An engine's memory: pages of two regions."""

    def __init__(self, pages: int = 6) -> None:
        self.bytes = np.zeros((2, pages, PAGE // 2), np.uint8)

    def regions(self, wanted: range) -> list[list[PageRegion]]:
        return [
            [PageRegion(part[page].ctypes.data, PAGE // 2) for part in self.bytes]
            for page in wanted
        ]

    def fill(self) -> None:
        self.bytes[:] = np.random.default_rng(3).integers(1, 255, self.bytes.shape, np.uint8)


def open_pages(cls: type, timeout: float = 5.0) -> PageStore:
    storage = {"backend": f"{cls.__module__}:{cls.__name__}", "timeout_s": timeout}
    tier = open_storage({"model": "m", "block_bytes": PAGE, "num_slots": 1, "storage": storage})
    return PageStore(tier, PAGE, timeout, buffer_bytes=2 * PAGE)  # batches of two pages


@pytest.fixture
def memory() -> Any:
    FaultyStore.mode, SharedStore.mode = "ok", "ok"
    found = Memory()
    found.fill()
    yield found
    FaultyStore.mode, SharedStore.mode = "ok", "ok"
    FaultyStore.unreadable = set()
    SharedStore.pool.clear()


@pytest.mark.parametrize("cls", [FaultyStore, SharedStore])
def test_pages_come_back_whole(memory: Memory, cls: type) -> None:
    store = open_pages(cls)
    assert store.look_up(KEYS) == [False] * 6
    assert store.save(KEYS[:5], memory.regions(range(5))) == [True] * 5
    assert store.save(KEYS[:5], memory.regions(range(5))) == [True] * 5
    store.close(5.0)
    again = open_pages(cls) if cls is SharedStore else store
    if again is store:
        assert store.load(KEYS, memory.regions(range(6))) == [False] * 6  # closed
        return
    other = Memory()
    assert again.look_up(KEYS) == [True] * 5 + [False]
    assert again.load(KEYS[:5], other.regions(range(5))) == [True] * 5
    assert (other.bytes[:, :5] == memory.bytes[:, :5]).all()
    again.close(5.0)
    again.close(5.0)


def test_a_page_that_cannot_be_read_leaves_its_memory_unchanged(memory: Memory) -> None:
    store = open_pages(FaultyStore)
    assert all(store.save(KEYS, memory.regions(range(6))))
    FaultyStore.unreadable = {store.tier.name_of(KEYS[3])}
    other = Memory()
    assert store.load(KEYS, other.regions(range(6)))[:4] == [True, True, True, False]
    assert (other.bytes[:, :3] == memory.bytes[:, :3]).all()
    assert not other.bytes[:, 3].any()
    store.close(5.0)


def test_a_call_ends_at_its_deadline_and_its_memory_is_the_engine_s_again(memory: Memory) -> None:
    store = open_pages(FaultyStore, timeout=600.0)
    assert all(store.save(KEYS, memory.regions(range(6))))
    FaultyStore.mode = "hang"
    other = Memory()
    begun = time.monotonic()
    assert store.load(KEYS, other.regions(range(6)), begun + 0.3) == [False] * 6
    assert time.monotonic() - begun < 60.0
    FaultyStore.mode = "ok"  # reads that hung go on, and their memory belongs to others now
    store.tier.drain(30.0)
    assert not other.bytes.any()
    store.close(5.0)


def test_a_store_that_fails_is_a_miss(memory: Memory) -> None:
    store = open_pages(FaultyStore)
    assert all(store.save(KEYS[:2], memory.regions(range(2))))
    FaultyStore.mode = "raise"
    assert store.load(KEYS[:2], memory.regions(range(2))) == [False, False]
    assert store.save(KEYS[2:], memory.regions(range(2, 6))) == [False] * 4
    store.close(5.0)
