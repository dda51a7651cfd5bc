"""Pages of SGLang's pools: their bytes and identity, their moves, and their storage."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np

from kvactors.errors import CacheClosed, ConfigError, DeviceError
from kvactors.integrations.page_store import PageRegion
from kvactors.tier_cache import CopyWorker, TierCache
from kvactors.tier_cache.cache import leading_keys

POOL = "MHATokenToKVPool"  # its pages are rows of keys and of values in every layer
LAYOUT = "nhd"  # the heads of one token side by side


class DevicePages:
    """The pages of one device pool. Row p of each tensor is the share of page p: keys of every
    layer, then values."""

    def __init__(self, pool: Any, page_tokens: int) -> None:
        kind, layout = type(pool).__name__, getattr(pool, "kv_cache_layout", None)
        scales = ("k_scale_buffer", "native_k_scale_buffer")
        scaled = any(getattr(pool, name, None) is not None for name in scales)
        if kind != POOL or layout != LAYOUT or scaled or not pool.k_buffer:
            form = f"{kind}, layout {layout!r}{', with scales' if scaled else ''}"
            raise ConfigError(
                f"KVActorsLinker moves pages of {POOL} with the layout {LAYOUT!r}, and this "
                f"model's device pool is {form}: use KVActorsHiCache"
            )
        self.page_tokens = page_tokens
        self.tensors = [self._rows(buffer) for buffer in (*pool.k_buffer, *pool.v_buffer)]
        sizes = [one.stride(0) * one.element_size() for one in self.tensors]
        self.page_bytes = sum(sizes)
        self.facts: dict[str, str | int | None] = {
            "name": "kv",
            "kind": kind,
            "layout": str(layout),
            "dtype": str(pool.dtype),
            "store_dtype": str(pool.store_dtype),
            "page_tokens": page_tokens,
            "regions": ",".join(map(str, sizes)),
            "start_layer": int(pool.start_layer or 0),
            "head_num": int(pool.head_num),
            "head_dim": int(pool.head_dim),
            "v_head_dim": int(pool.v_head_dim),
        }
        """The facts that two pools must share for their pages to be interchangeable."""

    def _rows(self, buffer: Any) -> Any:
        """A layer's keys or values with one row for each whole page."""
        pages = buffer.shape[0] // self.page_tokens
        return buffer[: pages * self.page_tokens].view(pages, -1)

    def numbers(self, indices: Any, count: int) -> list[int]:
        """The pages of tokens' indices. ValueError if they are not those of so many whole pages."""
        _check_count(indices, count, self.page_tokens)
        tokens = np.array(indices.tolist(), np.int64).reshape(count, self.page_tokens)
        starts = tokens[:, 0]
        whole = (tokens == starts[:, None] + np.arange(self.page_tokens)).all(axis=1)
        whole &= starts % self.page_tokens == 0
        if not whole.all():
            wrong = tokens[int(np.argmin(whole))]
            raise ValueError(
                f"indices {wrong[0]} to {wrong[-1]} are not a page of {self.page_tokens}"
            )
        return [int(page) for page in starts // self.page_tokens]


class HostPages:
    """The pages of one host pool. `page_tokens`: indices of a page."""

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.page_tokens = int(pool.page_size)
        self._sizes = self._sizes_of_page()
        self.page_bytes = sum(self._sizes)

    def _sizes_of_page(self) -> tuple[int, ...]:
        import torch

        kind = type(self.pool).__name__
        try:
            first = self.pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(
                f"SGLang's host pool {self.name!r} ({kind}, layout "
                f"{getattr(self.pool, 'layout', None)!r}) gives no addresses of its pages: {error}"
            ) from error
        sizes = () if not first else tuple(int(size) for size in first[1])
        if not sum(sizes):
            raise ConfigError(f"SGLang's host pool {self.name!r} ({kind}) keeps no bytes")
        return sizes

    @property
    def facts(self) -> dict[str, str | int | None]:
        """The facts that two pools must share for their pages to be interchangeable."""
        pool = self.pool
        optional = ("layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim")
        return {
            "name": self.name,
            "kind": type(pool).__name__,
            "layout": str(getattr(pool, "layout", None)),
            "format": getattr(pool, "storage_format_tag", None),
            "dtype": str(getattr(pool, "dtype", None)),
            "page_tokens": self.page_tokens,
            "regions": ",".join(map(str, self._sizes)),
            **{name: _number(getattr(pool, name, None)) for name in optional},
        }

    def regions(self, indices: Any, count: int) -> list[list[PageRegion]]:
        _check_count(indices, count, self.page_tokens, f" ({self.name})")
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        each = len(self._sizes)
        if len(addresses) != count * each or tuple(sizes) != self._sizes * count:
            raise ValueError(f"pages of {self.name} are not those of the start")
        pairs = [PageRegion(int(a), int(n)) for a, n in zip(addresses, sizes, strict=True)]
        return [pairs[i * each : (i + 1) * each] for i in range(count)]


def _check_count(indices: Any, count: int, page_tokens: int, of: str = "") -> None:
    found = None if indices is None else len(indices)
    if found != count * page_tokens:
        raise ValueError(f"{found} indices of {count} pages with {page_tokens} each{of}")


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# -- Loads and stores of an engine's device pages, over a `TierCache`, in the scheduler's thread.

NOTHING = -1  # the number of a batch without loads


class _Load(NamedTuple):
    """The pages of one request, pinned."""

    keys: Sequence[bytes]
    pages: Sequence[int]
    slots: Sequence[int]


@dataclass
class _Batch:
    """Loads that were started together, as one copy. `ok`: whether it has not failed."""

    keys: Sequence[bytes]
    ok: bool = True


@dataclass
class _Store:
    """A store.

    Attributes:
        pages: places on the device, by key, in the order of the path.
        keys: of the pages that are copied now.
        whole: whether no page was refused a slot, and no copy has failed.
    """

    pages: Mapping[bytes, int]
    parents: Mapping[bytes, bytes | None]
    waiting: Sequence[bytes]
    keys: Sequence[bytes] = ()
    whole: bool = True

    @property
    def in_flight(self) -> bool:
        """Whether a page is copied, or waits for a slot."""
        return bool(self.keys or self.waiting)


class PageMoves:
    """Loads and stores of device pages, with the calls of SGLang's `UnifiedCacheLinker`, all from
    one thread.

    A page is answered as found when its bytes are in host memory, verified. So a load is a copy
    from memory, which does not fail while the device works.

    Args:
        fetch_wait_s: seconds that all calls of `find` in a step wait for pages from storage.

    Attributes:
        consumer_index: number of the batch that the next forward pass needs, -1 for none.
    """

    def __init__(self, tiers: TierCache, copies: CopyWorker, fetch_wait_s: float) -> None:
        self._tiers = tiers
        self._copies = copies
        self._fetch_wait_s = self._wait_left_s = fetch_wait_s
        self._queued: dict[str, _Load] = {}
        self._numbers = count()  # of copies
        self._batches: dict[Hashable, _Batch] = {}
        self._stores: dict[Hashable, _Store] = {}  # in the order of the calls
        self._closed = False
        self.consumer_index = NOTHING

    def stream(self) -> int | None:
        """The handle of the stream of a GPU that a copy comes after, None for host memory."""
        return None

    # -- look-up

    def find(self, keys: Sequence[bytes]) -> int:
        """Pages from the start that can be loaded, until `end_step`. Waits while pages are on their
        way from storage. Those that arrive later serve later look-ups."""
        if self._closed:
            return 0
        keys = keys[: self._tiers.config.num_slots]
        until = time.monotonic() + self._wait_left_s
        while True:
            self._collect()
            found, waits = leading_keys(self._tiers, keys)
            now = time.monotonic()
            if not waits or now >= until:
                self._wait_left_s = max(0.0, until - now)
                return found
            self._tiers.end_step()  # begins fetches, and pauses

    # -- loads

    def queue_load(self, request: str, keys: Sequence[bytes], pages: Sequence[int]) -> bool:
        """Have pages loaded with the next batch. Returns whether they will be."""
        if self._closed or request in self._queued:
            return False
        try:
            slots = self._tiers.prepare_load(keys)
        except ValueError:  # a page was evicted after its look-up
            return False
        self._queued[request] = _Load(keys, pages, slots)
        return True

    def cancel_queued_load(self, request: str) -> bool:
        """Forget a queued load. Returns whether there was one."""
        load = self._queued.pop(request, None)
        if load is not None:
            self._tiers.complete_load(load.keys)
        return load is not None

    def start_layer_wise_loading(self) -> int:
        """Begin the queued loads. Returns the number of their batch, `NOTHING` without any."""
        if not self._queued:
            return NOTHING
        number = next(self._numbers)
        loads, self._queued = list(self._queued.values()), {}
        keys, pages, slots = (list(chain(*each)) for each in zip(*loads, strict=True))
        self._batches[number] = batch = _Batch(keys)
        try:
            self._copies.submit_load(number, pages, slots, stream=self.stream())
        except (DeviceError, CacheClosed, ValueError):
            batch.ok = False
        return number

    def set_consumer(self, index: int) -> None:
        """Name the batch that the next forward pass needs, -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Wait for a layer of that batch: for all, since a page is copied with all layers.
        DeviceError if the copy hangs: the engine would compute with its pages."""
        self._copies.finish([self.consumer_index])

    def finish_layer_wise_loading(self, number: Hashable) -> bool:
        """Wait for a batch and let go of its pages. Returns whether all of them were loaded."""
        self._copies.finish([number])
        self._collect()
        batch = self._batches.pop(number, None)
        if batch is None:
            return True
        self._tiers.complete_load(batch.keys)
        return batch.ok

    # -- stores

    def queue_store(self, keys: Sequence[bytes], pages: Sequence[int]) -> bool:
        """Copy device pages to the host tier. Pages without a slot wait for one: SGLang keeps them
        until the store is counted as completed. Returns whether a store has begun."""
        if self._closed:
            return False
        number = next(self._numbers)
        parents = dict(zip(keys, [None, *keys[:-1]], strict=True))
        store = _Store(dict(zip(keys, pages, strict=True)), parents, keys)
        self._go_on(number, store)
        if not (store.in_flight or store.whole):
            return False
        self._stores[number] = store
        return True

    def _go_on(self, number: Hashable, store: _Store) -> None:
        """Copy the pages of a store that get slots now."""
        parents = [store.parents[key] for key in store.waiting]
        found = self._tiers.prepare_store(store.waiting, parents)
        store.keys, store.waiting = found.keys, found.waiting
        store.whole = store.whole and not found.refused
        if not found.keys:
            return
        pages = [store.pages[key] for key in found.keys]
        try:
            self._copies.submit_store(number, pages, found.slots, stream=self.stream())
        except (DeviceError, CacheClosed, ValueError):
            self._tiers.complete_store(found.keys, success=False)
            store.keys = store.waiting = ()
            store.whole = False

    def num_completed_offloads(self) -> int:
        """Stores that have ended, up to the oldest that has not. SGLang's scheduler asks at the
        start of every step: found pages may be evicted, and waiting stores go on."""
        self._wait_left_s = self._fetch_wait_s
        if not self._closed:
            self._collect()
            self._tiers.end_step()
            for number, store in self._stores.items():
                if store.waiting and not store.keys:
                    self._go_on(number, store)
        self._collect()
        return next(
            (i for i, store in enumerate(self._stores.values()) if store.in_flight),
            len(self._stores),
        )

    def pop_completed_offload(self) -> bool:
        """Forget the oldest store. Returns whether all of its pages were stored."""
        self._collect()
        oldest = next(iter(self._stores), None)
        if oldest is None or self._stores[oldest].in_flight:
            raise LookupError("no store has ended")
        return self._stores.pop(oldest).whole

    # -- the rest

    def _collect(self) -> None:
        for ended in self._copies.get_finished():
            if ended.stored:
                store = self._stores[ended.job]
                self._tiers.complete_store(store.keys, success=not ended.error)
                store.whole, store.keys = store.whole and not ended.error, ()
            elif ended.error:
                self._batches[ended.job].ok = False

    def reset(self) -> None:
        """End all moves and forget the pages of the host tier. Stored objects stay."""
        self._end_moves()
        if not self._closed:
            self._tiers.reset()

    def _end_moves(self) -> None:
        """Wait for every copy. DeviceError if one hangs: the engine would reuse its pages."""
        for request in list(self._queued):
            self.cancel_queued_load(request)
        for number in list(self._batches):
            self.finish_layer_wise_loading(number)
        for store in self._stores.values():
            store.waiting = ()
        self._copies.finish(self._stores)
        self._collect()
        self._stores.clear()

    def close(self) -> None:
        if not self._closed:
            self._end_moves()
            self._closed = True
            self._copies.shutdown()
            self._tiers.shutdown()


class Prefixes(NamedTuple):
    """Prefixes that can be restored, in pages: the longest one, the longest one that each pool
    allows, and those that every pool allows, ascending."""

    longest: int
    of_pools: list[int]
    restorable: list[int]


def leading(has: Sequence[bool]) -> int:
    """Pages that are there before the first one that is not."""
    return next((i for i, found in enumerate(has) if not found), len(has))


def find_prefixes(kv_pages: int, pools: Sequence[tuple[Sequence[bool], int]]) -> Prefixes:
    """Find the prefixes that every pool allows. `kv_pages`: of the longest one that the pool of
    keys and values allows. `pools`: for each other one, whether it has each page, and how many last
    pages of a prefix it must have."""
    allowed = [_with_window(has, trailing) for has, trailing in pools]
    restorable = [one for one in range(1, kv_pages + 1) if all(one in found for found in allowed)]
    longest = [max(found, default=0) for found in allowed]
    return Prefixes(max(restorable, default=0), longest, restorable)


def _with_window(has: Sequence[bool], trailing: int) -> set[int]:
    """Prefixes whose last pages are there."""
    found, run = set(), 0
    for i, there in enumerate(has):
        run = run + 1 if there else 0
        if run >= min(trailing, i + 1):
            found.add(i + 1)
    return found
