"""LMCache's entry point: the L2 adapter that LMCache loads by module path."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed import api
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.integrations.engine import log_to
from kvactors.integrations.lmcache.catalog import (
    KeyCatalog,
    KeyFile,
    ObjectShape,
    StoredObject,
    layout_of,
    stored_object,
)
from kvactors.integrations.lmcache.object_store import BUFFERS, Buffer, ObjectStore, TransferTask
from kvactors.integrations.lmcache.settings import L2Settings, read_settings, store_config
from kvactors.integrations.page_store import PageStore
from kvactors.native import addresses
from kvactors.settings.check import in_bytes
from kvactors.tier_cache import StorageTier, TierConfig, open_storage

STOP_LIMIT_S = 5.0  # of the moves in flight, and of the loop, which never waits


class KVActorsL2(L2AdapterInterface):
    """kvactors' verified file store as an L2 adapter of LMCache.

    Objects are found again only under the same key (chunk hash, model, world size and rank, object
    group, salt) with the same layout and size. An object whose bytes are not those that were stored
    is a failed load. Locked objects are never evicted.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        log_to(init_logger("lmcache.kvactors"))
        settings = read_settings(params)
        config = store_config(settings)
        super().__init__(max_capacity_bytes=settings.pages * settings.page)
        self.settings = settings
        self._numbers = itertools.count()
        self._stores: deque[tuple[int, Any]] = deque()
        self._lookups: dict[int, Any] = {}
        self._loads: dict[int, Any] = {}
        self._closed = False
        tier = self._tier = open_storage(config)
        try:
            catalog, keys = read_keys(tier, config, settings)
        except BaseException:
            tier.close(settings.close_timeout_s)
            raise
        self._pages = PageStore(
            tier,
            settings.page,
            settings.timeout_s,
            buffer_bytes=in_bytes(settings.staging_bytes, "staging_bytes") // BUFFERS,
        )
        self._objects = ObjectStore(self._pages, keys, catalog, self)
        self._store_event, self._lookup_event, self._load_event = (
            create_event_notifier() for _ in range(3)
        )
        recovered = catalog.items()
        if recovered:
            self._notify_keys_stored(
                [key for key, _ in recovered], [found.shape.size for _, found in recovered]
            )

    # -- event descriptors

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    # -- stores and loads

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(keys, objects, save=True)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """The store tasks that have ended. A success has each of its objects in the store."""
        done = {}
        with suppress(IndexError):
            while True:
                number, result = self._stores.popleft()
                done[number] = result
        return done

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(keys, objects, save=False)

    def query_load_result(self, task_id: int) -> Any:
        """The objects of a load task that were loaded and verified, once. None before its end."""
        return self._loads.pop(task_id, None)

    def _submit(self, keys: Sequence[Any], objects: Sequence[Any], *, save: bool) -> int:
        if len(keys) != len(objects):
            raise ValueError(f"{len(objects)} objects for {len(keys)} keys")
        buffers = [buffer_of(each, writable=not save) for each in objects]
        deadline = time.monotonic() + self.settings.timeout_s
        task = TransferTask(next(self._numbers), list(keys), buffers, deadline, save=save)
        self._hand_over(partial(self._objects.begin, task), partial(self.task_ended, task))
        return task.number

    def _hand_over(self, call: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Give a call to the loop. After the end the caller has its answer at once."""
        if self._closed or not self._objects.post(call):
            otherwise()

    # -- look-ups and locks

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look objects up, and lock those that are found. Returns the task's id."""
        number = next(self._numbers)
        layouts = {
            group: layout_of(layout.shapes, layout.dtypes)
            for group, layout in (group_layout_descs or {}).items()
            if layout is not None and layout.shapes
        }
        self._hand_over(
            partial(self._objects.look_up, number, list(keys), layouts),
            partial(self.looked_up, number, [False] * len(keys)),
        )
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """The objects that a look-up has found and locked, once. None before its end."""
        return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        if not self._closed:
            self._objects.post(partial(self._objects.unlock, list(keys)))

    # -- results: called on the store's loop

    def task_ended(self, task: TransferTask) -> None:
        if task.save:
            self._stores.append((task.number, L2StoreResult(all(task.ok), task.nbytes)))
            self._signal(self._store_event)
        else:
            self._loads[task.number] = bitmap(task.ok)
            self._signal(self._load_event)

    def looked_up(self, number: int, found: list[bool]) -> None:
        self._lookups[number] = bitmap(found)
        self._signal(self._lookup_event)

    stored = L2AdapterInterface._notify_keys_stored
    accessed = L2AdapterInterface._notify_keys_accessed
    deleted = L2AdapterInterface._notify_keys_deleted

    @staticmethod
    def _signal(event: Any) -> None:
        with suppress(OSError, ValueError):  # closed
            event.notify()

    # -- eviction, listing, status

    def delete(self, keys: list[Any]) -> None:
        self._objects.ask(partial(self._objects.delete, list(keys)), self.settings.timeout_s, 0)

    def register_listener(self, listener: Any) -> None:
        """Register a listener, and report the objects of the store to it."""

        def register() -> None:
            L2AdapterInterface.register_listener(self, listener)
            known = self._objects.catalog.items()
            if known:
                keys = [key for key, _ in reversed(known)]  # the last one is evicted first
                listener.on_l2_keys_stored(keys, [found.shape.size for _, found in reversed(known)])

        self._objects.ask(register, self.settings.timeout_s, None)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise ValueError(f"malformed cursor {cursor!r}")
        start = int(cursor or 0)
        nothing: list[tuple[Any, StoredObject]] = []
        known = self._objects.ask(self._objects.catalog.items, self.settings.timeout_s, nothing)
        entries = sorted(
            (found.digest, key, found.shape.size)
            for key, found in known
            if model_name in (None, key.model_name)
        )
        page = tuple(
            KeyEntry(key.to_encoded_object_key(), size)
            for _, key, size in entries[start : start + page_size]
        )
        end = start + page_size
        return KeyListPage(page, str(end) if end < len(entries) else None)

    def get_memory_tags(self) -> Any:
        """The medium of the objects, which LMCache asks for from 0.5.7 on."""
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL)

    def report_status(self) -> dict[str, Any]:
        catalog = self._objects.catalog
        failing = "; ".join(self._tier.failing)
        trouble = self._tier.trouble or failing or self._objects.keys.error
        return {
            "is_healthy": self._objects.running and not trouble,
            "type": type(self).__name__,
            "trouble": trouble,
            "stored_object_count": len(catalog.objects),
            "locked_key_count": len(catalog.locks),
            "bytes_used": catalog.nbytes,
            "pages_used": catalog.used,
            "pages": catalog.capacity,
            "tasks_in_flight": len(self._objects.tasks),
            "directory": self.settings.directory,
        }

    # -- end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        stopped = self._objects.stop(STOP_LIMIT_S)
        self._pages.close(self.settings.close_timeout_s)
        self._objects.keys.close()
        if stopped:  # else the thread may still signal
            for event in (self._store_event, self._lookup_event, self._load_event):
                event.close()


def bitmap(found: Sequence[bool]) -> Any:
    """LMCache's bitmap."""
    bits = Bitmap(len(found))
    for index, there in enumerate(found):
        if there:
            bits.set(index)
    return bits


def buffer_of(memory_object: Any, *, writable: bool) -> Buffer | None:
    """The memory of an object of LMCache, None if it cannot be used.

    Properties of LMCache's objects raise NotImplementedError where there is no host memory (GDS),
    and check their state with `assert`. The task of such an object fails for its key.
    """
    try:
        view = memoryview(memory_object.byte_array).cast("B")
        if not view.nbytes or (writable and view.readonly):
            return None
        described = memory_object.metadata
        if described.shapes is None or described.dtypes is None:  # of one tensor
            layout = layout_of([described.shape], [described.dtype])
        else:
            layout = layout_of(described.shapes, described.dtypes)
        return Buffer(ObjectShape(layout, view.nbytes), addresses([view])[0], (view, memory_object))
    except (TypeError, ValueError, AttributeError, AssertionError, NotImplementedError):
        return None


def read_keys(
    tier: StorageTier, config: TierConfig, settings: L2Settings
) -> tuple[KeyCatalog, KeyFile]:
    """The objects of the store, and the open file of their keys. Other pages are removed."""
    storage = config.storage
    identity = StoreIdentity(config.model, storage.namespace, config.fingerprint)
    name = f"keys-{identity.digest.hex()[:16]}.jsonl"
    keys = KeyFile(identity.folder(storage.directory) / name)
    catalog = KeyCatalog(settings.pages)
    try:
        for stored, shape in keys.run(keys.read, settings.open_timeout_s):
            with suppress(ValueError):
                key = ObjectKey(*stored)
                found = stored_object(key, shape, tier.block_bytes)
                if all(map(tier.contains, found.page_keys())):
                    catalog.remove(key)
                    catalog.add(key, found)
        tier.retain(page for _, found in catalog.items() for page in found.page_keys())
        keys.run(partial(keys.rewrite, catalog.records()), settings.open_timeout_s)
    except TimeoutError:
        raise StoreError(f"{keys.path} was not read in {settings.open_timeout_s} seconds") from None
    except OSError as error:
        raise StoreError(f"{keys.path}: {error}") from error
    return catalog, keys
