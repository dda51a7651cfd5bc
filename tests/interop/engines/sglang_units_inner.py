"""kvactors as HiCache storage and as linker below SGLang's prefix tree and its pools, without an
engine.

The trees come from the test kit that SGLang ships. So every kind of pool that runs on a CPU is
tested, with pages of 1 to 128 tokens: full attention, sliding windows, Mamba states.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
import time
import types
import unittest
from array import array
from pathlib import Path
from typing import Any

import torch

# the kit takes one base class from a module that imports SGLang's benchmarks
_utils = types.ModuleType("sglang.test.test_utils")
_utils.CustomTestCase = unittest.TestCase
sys.modules["sglang.test.test_utils"] = _utils

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    CacheRequestHandle,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.pool_host import base as pool_host  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.test.kits.unified_radix_cache import mixins  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CONFIGS, supports_hicache  # noqa: E402
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures  # noqa: E402

from kvactors.integrations.sglang import hicache, linker  # noqa: E402

hicache.digest_of_models = linker.digest_of_models = lambda: "tiny"
"""The kit publishes no model."""


class CountedStore(hicache.PageStore):
    """Counts pages that were read and written."""

    loaded = saved = 0

    def load(self, *arguments: Any) -> list[bool]:
        ok = super().load(*arguments)
        self.loaded += sum(ok)
        return ok

    def save(self, *arguments: Any) -> list[bool]:
        ok = super().save(*arguments)
        self.saved += sum(ok)
        return ok


hicache.PageStore = CountedStore
pool_host.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
"""SGLang leaves 10 GiB to others, and these pools have a few MB each."""
PAGES = 4
MARKER = 7
CAPACITY = 500
"""Pages that a store may hold."""


def server_args(**given: Any) -> Any:
    """SGLang's settings, with kvactors in place of SGLang's file storage."""
    if given.get("hicache_storage_backend") == "file":
        extra = json.loads(given["hicache_storage_backend_extra_config"] or "{}")
        directory = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
        extra |= {
            "backend_name": "kvactors",
            "module_path": "kvactors.integrations.sglang",
            "class_name": "KVActorsHiCache",
            "interface_v1": 1,
            "model": "tiny",
            "storage": {"backend": "file", "directory": directory, "capacity_blocks": CAPACITY},
        }
        given["hicache_storage_backend"] = "dynamic"
        given["hicache_storage_backend_extra_config"] = json.dumps(extra)
    direct = {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
    return real_server_args(**(given | direct))


real_server_args = mixins.ServerArgs
mixins.ServerArgs = server_args


def kvactors_of(cache: Any) -> Any:
    """The storage of a tree, which SGLang's failure injector may wrap."""
    storage = cache.cache_controller.storage_backend
    return getattr(storage, "_backend", storage)


class Storage(UnifiedRadixCacheStorageFixtures):
    """A tree that writes pages to the store, and another one that reads them."""

    def sequence(self) -> list[int]:
        """Tokens of some pages, more than a sliding window has."""
        window = self.cfg.sliding_window_size or 0
        return self._make_seq(1, max(PAGES, -(-window // self.cfg.page_size) + 1))

    def _make_storage_dir(self) -> str:
        folder = tempfile.mkdtemp()  # outlives the trees: see `drop`
        self.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def drop(self, cache: Any) -> None:
        """Close the store of a tree and free its pools: those of one case need 10 GB together."""
        kvactors_of(cache).close()
        self.doCleanups()

    def open(self, folder: str) -> Any:
        """A tree with the store."""
        gc.collect()  # pools of trees that were dropped
        cache, allocator, requests = build_fixture(self.cfg)
        self._init_hicache(cache, storage_backend="file", storage_dir=folder, prefetch_threshold=1)
        self.addCleanup(kvactors_of(cache).close)
        return cache, allocator, requests

    def write(self, folder: str, tokens: list[int]) -> Any:
        """Store the pages of some tokens. Returns their keys and values."""
        cache, allocator, requests = self.open(folder)
        self._insert(cache, allocator, requests, tokens)
        leaf = match_prefix(cache, tokens).last_device_node
        indices = cache.path_device_indices(leaf)
        self._fill_full_kv(allocator, indices, marker=MARKER)
        written = self._snapshot_full_kv(allocator, indices)
        self._backup_node(cache, leaf)
        self._write_path_to_l3(cache, leaf)
        self._flush_l3_backups(cache)
        counters = dict(kvactors_of(cache)._stores)
        assert all(pool.saved for pool in counters.values()), counters
        assert set(counters) == self.pools()
        self.drop(cache)
        return written

    def pools(self) -> set[str]:
        """The host pools of the model."""
        return {
            "kv",
            *(["swa"] if self.cfg.has_swa else []),
            *(["mamba"] if self.cfg.has_mamba else []),
        }

    def read(self, folder: str, tokens: list[int]) -> tuple[int, Any, Any]:
        """Read the pages of some tokens. Returns the tokens that came from the store, their keys
        and values, and the counters of the store."""
        cache, allocator, requests = self.open(folder)
        self._consume_prefetch(cache, tokens, CacheRequestHandle("request", 0))
        counters = dict(kvactors_of(cache)._stores)
        kvactors_of(cache).close()
        match = match_prefix(cache, tokens)
        assert match.device_prefix_len == 0
        if not match.host_hit_length:
            self.drop(cache)
            return 0, None, counters
        self._load_back_through_admission(cache, requests, tokens)
        self._finish_pending_loads(cache)
        node = match_prefix(cache, tokens).last_device_node
        indices = cache.path_device_indices(node)
        found = self._snapshot_full_kv(allocator, indices)
        self.drop(cache)
        return len(indices), found, counters

    def test_pages_written_by_one_tree_are_read_by_another(self) -> None:
        folder, tokens = self._make_storage_dir(), self.sequence()
        written = self.write(folder, tokens)
        count, found, counters = self.read(folder, tokens)
        assert count == len(tokens)
        for one, other in zip(found, written, strict=True):
            assert (one == other).all()
            assert (one >= MARKER).all()
        assert all(pool.loaded for pool in counters.values()), counters

    def flip(self, folder: Path) -> None:
        """Flip bits in all pages."""
        slabs = list(folder.rglob("slab-*"))
        assert slabs
        for path in slabs:
            data = bytearray(path.read_bytes())
            data[::512] = bytes(byte ^ 0x40 for byte in data[::512])
            path.write_bytes(data)

    def test_flipped_bits_are_no_pages(self) -> None:
        folder, tokens = self._make_storage_dir(), self.sequence()
        self.write(folder, tokens)
        self.flip(Path(folder))
        count, _, counters = self.read(folder, tokens)
        assert count == 0
        assert not any(pool.loaded for pool in counters.values()), counters

    def test_a_pool_whose_pages_are_damaged_ends_the_prefix(self) -> None:
        folder, tokens = self._make_storage_dir(), self.sequence()
        self.write(folder, tokens)
        others = self.pools() - {"kv"}
        for pool in others:
            self.flip(Path(folder, f"pool-{pool}"))
        count, _, counters = self.read(folder, tokens)
        assert count == (0 if others else len(tokens))
        assert not any(counters[pool].loaded for pool in others), counters


class RecordedLinker(linker.KVActorsLinker):
    """Records the bytes of pages that are stored, and the places of those that are loaded."""

    def record(self, places: Any) -> dict[tuple[str, bytes], bytes]:
        """The bytes that the device has at places, by pool and key."""
        return {
            (name, key): b"".join(
                one[page].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                for one in self._pages[name].tensors
            )
            for name, (keys, pages) in places.items()
            for key, page in zip(keys, pages, strict=True)
        }

    def queue_store(self, places: Any) -> bool:
        self.stored = getattr(self, "stored", {}) | self.record(places)
        return bool(super().queue_store(places))

    def queue_load(self, request: str, places: Any) -> bool:
        self.loaded = places
        return bool(super().queue_load(request, places))


class Linked(mixins.UnifiedRadixCacheFixtures):
    """A tree above the linker."""

    LIMIT = 60.0
    """Seconds that a wait may take. Only a hang takes as long."""

    def setUp(self) -> None:
        gc.collect()  # pools of trees that were dropped
        self.cache, self.allocator, self.requests = build_fixture(self.cfg)
        if not self.cfg.has_swa:  # the kit's allocator gives the tokens from 1 on, in no pages
            self.allocator.alloc(self.cfg.page_size - 1)
        extra = {
            "host_bytes": "64MB",
            "model": "tiny",
            "fetch_wait_s": self.LIMIT,
            "storage": {"backend": "memory", "capacity_bytes": "256MB"},
        }
        components = set(self.cache.components)
        self.linker = RecordedLinker(
            None, self.cache.cache_init_params, components=components, extra_config=extra
        )
        self.cache.init_cache_linker(self.linker)
        self.addCleanup(self.linker.close)
        random = torch.Generator().manual_seed(3)
        for pages in self.linker._pages.values():
            for one in pages.tensors:
                one.copy_(torch.rand(one.shape, generator=random))

    def sequence(self, pages: int) -> list[int]:
        """Tokens of some pages, more than a sliding window has."""
        window = self.cfg.sliding_window_size or 0
        return self._make_seq(1, max(pages, -(-window // self.cfg.page_size) + 1))

    def store(self, tokens: list[int]) -> None:
        """Insert tokens and save their pages."""
        self._insert(self.cache, self.allocator, self.requests, tokens)
        until = time.monotonic() + self.LIMIT
        while self.cache.linker.pending_offloads or self.linker._tiers.has_pending_work():
            assert time.monotonic() < until, "a store does not end"
            self.cache.check_hicache_events()

    def forget(self) -> None:
        """Forget the pages of the device and of the host tier."""
        self.cache.reset()
        for pages in self.linker._pages.values():
            for one in pages.tensors:
                one.zero_()

    def load(self, tokens: list[int]) -> int:
        """Load what a request for tokens finds, and compare it. Returns the tokens."""
        request = self._make_req(self.requests)
        key = RadixKey(array("q", tokens))
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        if not match.host_hit_length:
            return 0
        self._apply_match_to_req(request, match)
        found = InitLoadBackParams(
            best_match_node=match.best_match_node,
            host_hit_length=match.host_hit_length,
            req=request,
        )
        count, _ = self.cache.init_load_back(found)
        self.cache.ready_to_load_host_cache()
        assert self.cache.linker.finish_loads() == []
        loaded = self.linker.record(self.linker.loaded)
        assert set(self.linker._pages) == {name for name, _ in loaded}
        assert all(self.linker.stored[one] == data for one, data in loaded.items())
        return count

    def test_pages_of_all_pools_come_back(self) -> None:
        tokens = self.sequence(PAGES)
        self.store(tokens)
        assert {name for name, _ in self.linker.stored} == set(self.linker._pages)
        self.forget()
        assert self.load(tokens) == len(tokens)
        self.linker._tiers.check()

    def test_a_prefix_ends_where_a_pool_has_its_pages(self) -> None:
        """A node is split where another prompt leaves it. Its state is at its end."""
        tokens = self.sequence(PAGES)
        self.store(tokens)
        self.forget()
        page = self.cfg.page_size
        shorter = tokens[:-page] + [5000 + i for i in range(page)]
        assert self.load(shorter) == (0 if self.cfg.has_mamba else len(tokens) - page)
        self.forget()
        others = [name for name in self.linker._pages if name != "kv"]
        for name in others:
            self.linker._tiers.groups[name].reset(storage=True)
        assert self.load(tokens) == (0 if others else len(tokens))


for _cfg in CONFIGS:
    for _kind in (Storage, Linked):
        if _kind is Linked or supports_hicache(_cfg):
            _name = f"Test{_kind.__name__}_{_cfg.label}"
            globals()[_name] = type(_name, (_kind, unittest.TestCase), {"cfg": _cfg})
