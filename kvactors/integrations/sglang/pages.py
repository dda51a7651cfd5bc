"""Pages of SGLang's pools: their bytes and identity, their moves, and their storage."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile
from typing import Any, NamedTuple

import numpy as np

from kvactors.errors import CacheClosed, ConfigError, DeviceError
from kvactors.integrations.page_store import PageRegion
from kvactors.tier_cache import CopyWorker, Lookup, TierCache

KV, SWA, STATE = "kv", "swa", "mamba"  # SGLang's names: full attention, windows, states
POOL = "MHATokenToKVPool"  # its pages are rows of keys and of values in every layer
LAYOUT = "nhd"  # the heads of one token side by side
MODELS = {POOL: "FULL", "SWAKVPool": "SWA", "HybridLinearKVPool": "MAMBA"}
"""Device pools of whole models, and the component of SGLang's tree that each comes with."""
STATES = "HybridReqToTokenPool"


class DevicePages:
    """The pages of one device pool. Row p of each tensor is the share of page p: keys of every
    layer, then values. The page of a state is one slot."""

    def __init__(
        self, name: str, page_tokens: int, tensors: Sequence[Any], facts: Mapping[str, Any]
    ) -> None:
        self.page_tokens = page_tokens
        self.tensors = tensors
        self.num_pages = int(tensors[0].shape[0])
        sizes = [one.stride(0) * one.element_size() for one in tensors]
        self.page_bytes = sum(sizes)
        self.facts: dict[str, str | int | None] = {
            "name": name,
            "page_tokens": page_tokens,
            "regions": ",".join(map(str, sizes)),
            **facts,
        }
        """The facts that two pools must share for their pages to be interchangeable."""

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


def device_pages(
    kvcache: Any, request_pool: Any, page_tokens: int, components: Collection[str]
) -> dict[str, DevicePages]:
    """The pages of the device pools of a model with these components of SGLang's tree.

    Raises:
        ConfigError: the pages of a pool have another form.
    """
    kind = type(kvcache).__name__
    if kind not in MODELS:
        raise _unsupported(kind)
    if MODELS[kind] not in components:  # a prefix would come back without these layers
        raise _unsupported(f"{kind} without {MODELS[kind]} in SGLang's tree")
    full = getattr(kvcache, "full_kv_pool", kvcache)
    found = {KV: _attention_pages(KV, full, page_tokens)}
    if "SWA" in components:
        found[SWA] = _attention_pages(SWA, kvcache.swa_kv_pool, page_tokens)
    if "MAMBA" in components:
        found[STATE] = _state_pages(request_pool)
    return found


def _attention_pages(name: str, pool: Any, page_tokens: int) -> DevicePages:
    kind, layout = type(pool).__name__, getattr(pool, "kv_cache_layout", None)
    scales = ("k_scale_buffer", "native_k_scale_buffer")
    scaled = any(getattr(pool, name, None) is not None for name in scales)
    if kind != POOL or layout != LAYOUT or scaled or not pool.k_buffer:
        raise _unsupported(f"{kind}, layout {layout!r}{', with scales' if scaled else ''}")
    facts = {
        "kind": kind,
        "layout": str(layout),
        "dtype": str(pool.dtype),
        "store_dtype": str(pool.store_dtype),
        "start_layer": int(pool.start_layer or 0),
        "head_num": int(pool.head_num),
        "head_dim": int(pool.head_dim),
        "v_head_dim": int(pool.v_head_dim),
    }
    buffers = (*pool.k_buffer, *pool.v_buffer)
    return DevicePages(name, page_tokens, [_rows(one, page_tokens) for one in buffers], facts)


def _rows(buffer: Any, page_tokens: int) -> Any:
    """A layer's keys or values with one row for each whole page."""
    pages = buffer.shape[0] // page_tokens
    return buffer[: pages * page_tokens].view(pages, -1)


def _state_pages(request_pool: Any) -> DevicePages:
    kind, more = type(request_pool).__name__, ("short_conv_pool", "ngram_pool")
    if kind != STATES or request_pool.mamba_ckpt_pool is not None:
        raise _unsupported(f"{kind}, with int8 checkpoints" if kind == STATES else kind)
    if any(getattr(request_pool, name).enabled for name in more):
        raise _unsupported(f"{kind}, with {' or '.join(more)}")
    pool = request_pool.mamba_pool
    states = [pool.mamba_cache.temporal, *pool.mamba_cache.conv]
    states = [one for one in states if one.numel()]  # some models have no recurrent state
    tensors = [one[layer] for one in states for layer in range(pool.num_mamba_layers)]
    shapes = ";".join(f"{one.dtype}{list(one.shape[2:])}" for one in states)
    facts = {"kind": type(pool).__name__, "layers": pool.num_mamba_layers, "shapes": shapes}
    return DevicePages(STATE, 1, tensors, facts)


def _unsupported(form: str) -> ConfigError:
    return ConfigError(
        f"KVActorsLinker moves pages of {POOL} with the layout {LAYOUT!r} and states of {STATES}, "
        f"and this model has a device pool of another form: {form}. Use KVActorsHiCache"
    )


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
    def num_pages(self) -> int:
        """Pages that the pool holds."""
        return int(self.pool.size) // self.page_tokens

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

Places = Mapping[str, tuple[Sequence[bytes], Sequence[int]]]
"""Pages of each pool: their keys, and their places on the device."""


class MovedPool(NamedTuple):
    """The host tier of a pool's pages, and the copies between it and the device."""

    tiers: TierCache
    copies: CopyWorker


class _Load(NamedTuple):
    """The pages of one request in one pool, pinned."""

    keys: Sequence[bytes]
    pages: Sequence[int]
    slots: Sequence[int]


@dataclass
class _Batch:
    """Loads that were started together, as one copy in each pool.

    Attributes:
        keys: of the pages, by pool.
        ok: whether no copy has failed.
    """

    keys: Mapping[str, Sequence[bytes]]
    ok: bool = True


@dataclass
class _Store:
    """A store in one pool.

    Attributes:
        pages: places on the device, by key.
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

    A prefix is answered as found when the bytes that every pool needs for it are in host memory,
    verified. So a load is a copy from memory, which does not fail while the device works.

    Args:
        tiers: of the keys and values. Its groups are those of the other pools, by name.
        copies: of each pool.
        fetch_wait_s: seconds that all calls of `find` in a step wait for pages from storage.

    Attributes:
        consumer_index: number of the batch that the next forward pass needs, -1 for none.
    """

    def __init__(
        self, tiers: TierCache, copies: Mapping[str, CopyWorker], fetch_wait_s: float
    ) -> None:
        self._tiers = tiers
        of_pool = {KV: tiers, **tiers.groups}
        self._moved = {name: MovedPool(of_pool[name], one) for name, one in copies.items()}
        self._fetch_wait_s = self._wait_left_s = fetch_wait_s
        self._queued: dict[str, dict[str, _Load]] = {}
        self._numbers = count()  # of copies
        self._batches: dict[Hashable, _Batch] = {}
        self._stores: dict[Hashable, dict[str, _Store]] = {}  # in the order of the calls
        self._closed = False
        self.consumer_index = NOTHING

    def stream(self) -> int | None:
        """The handle of the stream of a GPU that a copy comes after, None for host memory."""
        return None

    # -- look-up

    def find(self, keys: Sequence[bytes], windows: Mapping[str, int]) -> int:
        """Pages of the longest prefix that can be loaded, until `end_step`. Waits while pages are
        on their way from storage. Those that arrive later serve later look-ups.

        Args:
            keys: pages of the prefix.
            windows: the last pages of a prefix that a pool beside that of keys and values needs.
        """
        if self._closed:
            return 0
        until = time.monotonic() + self._wait_left_s
        while True:
            self._collect()
            longest = self._longest(keys, windows, (Lookup.HIT, Lookup.PENDING))
            answers = self._look_up(keys[:longest], windows)
            now = time.monotonic()
            if Lookup.PENDING not in answers or now >= until:
                break
            self._tiers.end_step()  # begins fetches, and pauses
        self._wait_left_s = max(0.0, until - now)
        if answers != {Lookup.HIT}:
            longest = self._longest(keys, windows, (Lookup.HIT,))
            self._look_up(keys[:longest], windows)
        return longest

    def _longest(
        self, keys: Sequence[bytes], windows: Mapping[str, int], wanted: Collection[Lookup]
    ) -> int:
        """Pages of the longest prefix whose pages have a wanted answer in every pool."""
        keys = keys[: self._tiers.config.num_slots]
        pages = sum(1 for _ in takewhile(lambda key: self._tiers.peek(key) in wanted, keys))
        pools = []
        for name, window in windows.items():
            tiers = self._moved[name].tiers
            fits = min(window, pages) <= tiers.config.num_slots
            pools.append(([fits and tiers.peek(key) in wanted for key in keys[:pages]], window))
        return find_prefixes(pages, pools).longest

    def _look_up(self, prefix: Sequence[bytes], windows: Mapping[str, int]) -> set[Lookup]:
        """The answers for the pages that a prefix needs. Those that are stored are fetched."""
        found = {self._tiers.lookup(key) for key in prefix}
        for name, window in windows.items():
            found.update(map(self._moved[name].tiers.lookup, prefix[-window:]))
        return found

    # -- loads

    def queue_load(self, request: str, places: Places) -> bool:
        """Have pages loaded with the next batch. Returns whether they will be."""
        if self._closed or request in self._queued:
            return False
        loads = self._queued[request] = dict[str, _Load]()
        for name, (keys, pages) in places.items():
            try:
                slots = self._moved[name].tiers.prepare_load(keys)
            except ValueError:  # a page was evicted after its look-up
                self.cancel_queued_load(request)
                return False
            loads[name] = _Load(keys, pages, slots)
        return True

    def cancel_queued_load(self, request: str) -> bool:
        """Forget a queued load. Returns whether there was one."""
        loads = self._queued.pop(request, None)
        if loads is None:
            return False
        for name, load in loads.items():
            self._moved[name].tiers.complete_load(load.keys)
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin the queued loads. Returns the number of their batch, `NOTHING` without any."""
        if not self._queued:
            return NOTHING
        number = next(self._numbers)
        queued, self._queued = list(self._queued.values()), {}
        batch_keys = dict[str, Sequence[bytes]]()
        self._batches[number] = batch = _Batch(batch_keys)
        for name, pool in self._moved.items():
            loads = [each[name] for each in queued if name in each]
            if not loads:
                continue
            keys, pages, slots = (list(chain(*each)) for each in zip(*loads, strict=True))
            batch_keys[name] = keys
            try:
                pool.copies.submit_load(number, pages, slots, stream=self.stream())
            except (DeviceError, CacheClosed, ValueError):
                batch.ok = False
        return number

    def set_consumer(self, index: int) -> None:
        """Name the batch that the next forward pass needs, -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Wait for a layer of that batch: for all, since a page is copied with all layers.
        DeviceError if the copy hangs: the engine would compute with its pages."""
        self._finish([self.consumer_index])

    def finish_layer_wise_loading(self, number: Hashable) -> bool:
        """Wait for a batch and let go of its pages. Returns whether all of them were loaded."""
        self._finish([number])
        self._collect()
        batch = self._batches.pop(number, None)
        if batch is None:
            return True
        for name, keys in batch.keys.items():
            self._moved[name].tiers.complete_load(keys)
        return batch.ok

    # -- stores

    def queue_store(self, places: Places) -> bool:
        """Copy device pages to the host tier. Pages without a slot wait for one: SGLang keeps them
        until the store is counted as completed. Returns whether a store has begun."""
        if self._closed:
            return False
        number = next(self._numbers)
        stores = dict[str, _Store]()
        for name, (keys, pages) in places.items():
            if name != KV:  # a prefix needs the last pages, which get slots first and leave last
                keys, pages = keys[::-1], pages[::-1]
            parents = dict(zip(keys, [None, *keys[:-1]], strict=True))
            stores[name] = _Store(dict(zip(keys, pages, strict=True)), parents, keys)
            self._go_on(number, name, stores[name])
        if not (_in_flight(stores) or _whole(stores)):
            return False
        self._stores[number] = stores
        return True

    def _go_on(self, number: Hashable, name: str, store: _Store) -> None:
        """Copy the pages of a store that get slots now."""
        tiers, copies = self._moved[name]
        parents = [store.parents[key] for key in store.waiting]
        found = tiers.prepare_store(store.waiting, parents)
        store.keys, store.waiting = found.keys, found.waiting
        store.whole = store.whole and not found.refused
        if not found.keys:
            return
        pages = [store.pages[key] for key in found.keys]
        try:
            copies.submit_store(number, pages, found.slots, stream=self.stream())
        except (DeviceError, CacheClosed, ValueError):
            tiers.complete_store(found.keys, success=False)
            store.keys = store.waiting = ()
            store.whole = False

    def num_completed_offloads(self) -> int:
        """Stores that have ended, up to the oldest that has not. SGLang's scheduler asks at the
        start of every step: found pages may be evicted, and waiting stores go on."""
        self._wait_left_s = self._fetch_wait_s
        if not self._closed:
            self._collect()
            self._tiers.end_step()
            for number, stores in self._stores.items():
                for name, store in stores.items():
                    if store.waiting and not store.keys:
                        self._go_on(number, name, store)
        self._collect()
        return next(
            (i for i, stores in enumerate(self._stores.values()) if _in_flight(stores)),
            len(self._stores),
        )

    def pop_completed_offload(self) -> bool:
        """Forget the oldest store. Returns whether all of its pages were stored."""
        self._collect()
        oldest = next(iter(self._stores), None)
        if oldest is None or _in_flight(self._stores[oldest]):
            raise LookupError("no store has ended")
        return _whole(self._stores.pop(oldest))

    # -- the rest

    def _collect(self) -> None:
        for name, (tiers, copies) in self._moved.items():
            for ended in copies.get_finished():
                if ended.stored:
                    store = self._stores[ended.job][name]
                    tiers.complete_store(store.keys, success=not ended.error)
                    store.whole, store.keys = store.whole and not ended.error, ()
                elif ended.error:
                    self._batches[ended.job].ok = False

    def _finish(self, numbers: Collection[Hashable]) -> None:
        for pool in self._moved.values():
            pool.copies.finish(numbers)

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
        for stores in self._stores.values():
            for store in stores.values():
                store.waiting = ()
        self._finish(self._stores)
        self._collect()
        self._stores.clear()

    def close(self) -> None:
        if not self._closed:
            self._end_moves()
            self._closed = True
            for pool in self._moved.values():
                pool.copies.shutdown()
            self._tiers.shutdown()


def _in_flight(stores: Mapping[str, _Store]) -> bool:
    return any(store.in_flight for store in stores.values())


def _whole(stores: Mapping[str, _Store]) -> bool:
    return all(store.whole for store in stores.values())


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
