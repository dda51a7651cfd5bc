"""Pages of SGLang's pools: their bytes and identity, their moves, and their storage."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np

from kvactors.errors import CacheClosed, ConfigError, DeviceError
from kvactors.tier_cache import CopyWorker, StorageResult, StorageTier, TierCache
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


class PageRegion(NamedTuple):
    """Contiguous memory."""

    address: int
    nbytes: int


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


BUFFER_BYTES = 32 << 20  # of a buffer, at least one page
AT_ONCE = 2  # buffers that a call uses while the store works on another one
KEPT = 4  # buffers kept for later calls


class PageStore:
    """Saves and loads pages, each within a deadline.

    The store never reads or writes the engine's memory. Pages are copied to and from buffers by the
    calling thread, so that a call to the disk that outlives its deadline finds no page that the
    engine has given to another request.
    """

    def __init__(self, tier: StorageTier, page_bytes: int, timeout: float) -> None:
        self.tier = tier
        self._page_bytes = page_bytes
        self._timeout = timeout
        self._batch_pages = max(1, BUFFER_BYTES // page_bytes)
        self._buffers: deque[np.ndarray] = deque()
        self._jobs = count()

    def look_up(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page can be read. A store that lists no objects is asked."""
        found = [self.tier.contains(key) for key in keys]
        unknown = [i for i, known in enumerate(found) if not known]
        if self.tier.lists or not unknown or self.tier.trouble:
            return found
        with suppress(CacheClosed, TimeoutError):
            asked = self.tier.submit_lookup(next(self._jobs), [keys[i] for i in unknown])
            for i, known in zip(unknown, asked.result(self._timeout).ok, strict=True):
                found[i] = known
        self.tier.poll()  # results are taken from the jobs
        return found

    def load(self, keys: Sequence[bytes], pages: Sequence[Sequence[PageRegion]]) -> list[bool]:
        """Read pages into the engine's memory. Returns whether each was read: the memory of one
        that failed is unchanged, and after a failure the pages of later buffers are not read."""
        tier = self.tier
        wanted = [i for i, key in enumerate(keys) if not tier.lists or tier.contains(key)]
        return self._move(keys, pages, wanted, [False] * len(keys), save=False)

    def save(self, keys: Sequence[bytes], pages: Sequence[Sequence[PageRegion]]) -> list[bool]:
        """Write pages from the engine's memory. Returns whether the store has each now."""
        ok = [self.tier.contains(key) for key in keys]
        wanted = [i for i, found in enumerate(ok) if not found]
        return self._move(keys, pages, wanted, ok, save=True)

    def _move(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Sequence[PageRegion]],
        wanted: Sequence[int],
        ok: list[bool],
        *,
        save: bool,
    ) -> list[bool]:
        """Move the wanted pages by buffers, and mark those that were moved in `ok`."""
        submit = self.tier.submit_store if save else self.tier.submit_load
        until = time.monotonic() + self._timeout
        in_flight: deque[tuple[Sequence[int], np.ndarray, Future[StorageResult]]] = deque()

        def finish() -> bool:
            """Wait for the oldest buffer. Returns whether the call goes on."""
            some, buffer, done = in_flight.popleft()
            self.tier.poll()  # results are taken from the jobs
            try:
                result = done.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                return False  # the job keeps its buffer
            self.tier.poll()
            good = [i for i, found in enumerate(result.ok) if found]
            if not save:
                read = ((i, pages[some[i]]) for i in good)
                self._copy(buffer, read, to_buffer=False)
            for i in good:
                ok[some[i]] = True
            if len(self._buffers) < KEPT:
                self._buffers.append(buffer)
            return save or len(good) == len(result.ok)

        size = self._page_bytes
        for first in range(0, len(wanted), self._batch_pages):
            if len(in_flight) == AT_ONCE and not finish():
                return ok
            if self.tier.trouble or time.monotonic() >= until:
                break
            buffer = self._buffer()
            some = wanted[first : first + self._batch_pages]
            if save:
                self._copy(buffer, enumerate(pages[i] for i in some), to_buffer=True)
            views = [buffer.data[i * size : (i + 1) * size] for i in range(len(some))]
            try:
                done = submit(next(self._jobs), [keys[i] for i in some], views)
            except CacheClosed:
                break
            in_flight.append((some, buffer, done))
        while in_flight and finish():
            pass
        return ok

    def _buffer(self) -> np.ndarray:
        try:
            return self._buffers.pop()
        except IndexError:  # other threads take buffers too
            return np.empty(self._batch_pages * self._page_bytes, np.uint8)

    def _copy(
        self,
        buffer: np.ndarray,
        pages: Iterable[tuple[int, Sequence[PageRegion]]],
        *,
        to_buffer: bool,
    ) -> None:
        """Copy pages to or from their places in a buffer. `memmove` lets other threads run."""
        for place, regions in pages:
            at = buffer.ctypes.data + place * self._page_bytes
            for region in regions:
                if to_buffer:
                    ctypes.memmove(at, region.address, region.nbytes)
                else:
                    ctypes.memmove(region.address, at, region.nbytes)
                at += region.nbytes

    def close(self, limit: float) -> None:
        """Close the store. Later calls answer that there is nothing."""
        self.tier.close(limit)
        self.tier.poll()


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
