"""kvactors as HiCache storage below SGLang's prefix tree and its host pools, without an engine.

The trees come from the test kit that SGLang ships. So every kind of host pool that runs on a CPU is
tested, with pages of 1 to 128 tokens: full attention, sliding windows, Mamba states.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

# the kit takes one base class from a module that imports SGLang's benchmarks
_utils = types.ModuleType("sglang.test.test_utils")
_utils.CustomTestCase = unittest.TestCase
sys.modules["sglang.test.test_utils"] = _utils

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.pool_host import base as pool_host  # noqa: E402
from sglang.test.kits.unified_radix_cache import mixins  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CONFIGS, supports_hicache  # noqa: E402
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures  # noqa: E402

from kvactors.integrations.sglang import hicache  # noqa: E402

hicache.digest_of_models = lambda: "tiny"
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


for _cfg in CONFIGS:
    if supports_hicache(_cfg):
        _name = f"Test_{_cfg.label}"
        globals()[_name] = type(_name, (Storage, unittest.TestCase), {"cfg": _cfg})
