"""LMCache's storage manager that answers lines of JSON: the program that runs in LMCache's
environment."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from lmcache.v1.distributed import storage_manager
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.quota_manager import QuotaManager
from lmcache.v1.distributed.storage_manager import StorageManager

SHAPE = torch.Size([2, 4, 64, 256])
STATE = torch.Size([3, 500])
"""The shape of an object of a second group: the state after a chunk."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LIMIT = 600.0
"""Seconds that a wait may take. It only bounds a hang."""


class Quotas(QuotaManager):
    """Quotas that are there before the first eviction: LMCache evicts every object of a salt that
    has none."""

    limits: ClassVar[dict[str, int]] = {}

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        for salt, limit in self.limits.items():
            self.set_quota(salt, limit)


storage_manager.QuotaManager = Quotas


class Server:
    """A storage manager and the requests of one test."""

    def __init__(self) -> None:
        self.manager: Any = None

    @property
    def adapter(self) -> Any:
        """The L2 adapter."""
        return self.manager.l2_adapters()[0][1]

    def open(self, l2: dict[str, Any], quotas: dict[str, int] | None = None) -> dict[str, Any]:
        """Start the manager with the arguments of LMCache's server.

        l2: of `--l2-adapter`. quotas: bytes of each salt.
        """
        line = ["--l1-size-gb", "0.0625", "--no-l1-use-lazy"]
        line += ["--eviction-policy", "LRU", "--l2-adapter", json.dumps(l2)]
        Quotas.limits = quotas or {}
        self.manager = StorageManager(parse_args(line))
        return {"stored": self.status()["stored_object_count"]}

    def status(self) -> dict[str, Any]:
        """The adapter's status."""
        return dict(self.adapter.report_status())

    def _when(self, holds: Callable[[dict[str, Any]], bool] = lambda found: True) -> dict[str, Any]:
        """The status once it holds, no task is in flight and no object is locked."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            found = self.status()
            if holds(found) and not found["tasks_in_flight"] + found["locked_key_count"]:
                break
            time.sleep(0.01)
        return self.status()

    def usage(self) -> dict[str, Any]:
        """LMCache's account of the adapter."""
        usage = self.adapter.get_usage()
        return {
            "bytes": usage.total_bytes_used,
            "capacity": usage.total_capacity_bytes,
            "by_salt": dict(usage.bytes_by_cache_salt),
        }

    def _write(self, keys: list[ObjectKey], shape: torch.Size = SHAPE) -> None:
        """Write objects to L1."""
        reserved = self.manager.reserve_write(keys, layout_of("float16", shape))
        for key, one in reserved.items():
            memoryview(one.byte_array).cast("B")[:] = payload(key, shape)
        self.manager.finish_write(list(reserved))

    def store(
        self, numbers: list[int], salt: str = "", wanted: int | None = None
    ) -> dict[str, Any]:
        """Write objects to L1, and wait until no store task is in flight.

        wanted: objects that the adapter must have then, at least.
        """
        self._write([key_of(number, salt) for number in numbers])
        least = len(numbers) if wanted is None else wanted
        return self._when(lambda found: found["stored_object_count"] >= least)

    def clear(self) -> dict[str, Any]:
        """Empty L1."""
        self.manager.clear(force=True)
        return {}

    def prefetch(
        self, numbers: list[int], salt: str = "", dtype: str = "float16"
    ) -> dict[str, Any]:
        """Prefetch objects and compare their bytes."""
        keys = [key_of(number, salt) for number in numbers]
        group = GroupedObjectKeys(keys, 0, layout_of(dtype))
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([group]))
        if not self.manager.wait_prefetch_status(handle, LIMIT):
            raise RuntimeError("the prefetch does not end")
        result = self.manager.query_prefetch_status(handle)
        hits = result.hit_cells[0].popcount()
        right = 0
        if hits:
            with self.manager.read_prefetched_results(keys[:hits]) as objects:
                found = [bytes(memoryview(one.byte_array).cast("B")) for one in objects]
            right = sum(data == payload(key) for data, key in zip(found, keys[:hits], strict=True))
            self.manager.finish_read_prefetched(keys[:hits])
        return {"hits": hits, "right": right, "l2": result.l2_hit_count}

    def groups(self, numbers: list[int]) -> dict[str, Any]:
        """Write chunks and the state after each, empty L1, and prefetch the chunks and the last
        state, as for a model with recurrent layers."""
        chunks = [key_of(number, "") for number in numbers]
        states = [key_of(number, "", group=1) for number in numbers]
        if not self.status()["stored_object_count"]:
            self._write(chunks)
            self._write(states, STATE)
            self._when(lambda found: found["stored_object_count"] >= 2 * len(numbers))
        self.manager.clear(force=True)
        rows = [
            GroupedObjectKeys(chunks, 0, layout_of("float16")),
            GroupedObjectKeys(states, 1, layout_of("float16", STATE), sliding_window_size=1),
        ]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(rows))
        if not self.manager.wait_prefetch_status(handle, LIMIT):
            raise RuntimeError("the prefetch does not end")
        result = self.manager.query_prefetch_status(handle)
        hits = [cells.popcount() for cells in result.hit_cells]
        wanted = {key: payload(key) for key in chunks[: hits[0]]}
        if hits[1]:
            wanted[states[hits[0] - 1]] = payload(states[hits[0] - 1], STATE)
        right = 0
        if wanted:
            with self.manager.read_prefetched_results(list(wanted)) as objects:
                found = [bytes(memoryview(one.byte_array).cast("B")) for one in objects]
            right = sum(map(bytes.__eq__, found, wanted.values()))
            self.manager.finish_read_prefetched(list(wanted))
        return {"hits": hits, "right": right} | self._when()

    def mixed(self, threads: int, rounds: int, keys: int) -> dict[str, Any]:
        """Threads that store and prefetch random runs of keys, with an L1 that is cleared at
        times."""
        totals = {"hits": 0, "wrong": 0, "l2": 0}
        errors: list[str] = []

        def work(seed: int) -> None:
            draw = random.Random(seed)
            earlier: list[list[int]] = []
            for _ in range(rounds):
                first = draw.randrange(keys)
                numbers = list(range(first, first + draw.randint(1, 6)))
                salt = f"thread-{seed}"
                self._write([key_of(number, salt) for number in numbers])
                earlier.append(numbers)
                until = time.monotonic() + LIMIT
                while self.status()["tasks_in_flight"] > 2 and time.monotonic() < until:
                    time.sleep(0.002)
                self.manager.clear()
                found = self.prefetch(draw.choice(earlier), salt)
                totals["hits"] += found["hits"]
                totals["l2"] += found["l2"]
                totals["wrong"] += found["hits"] - found["right"]

        def caught(seed: int) -> None:
            try:
                work(seed)
            except Exception:
                errors.append(traceback.format_exc())

        running = [threading.Thread(target=caught, args=(seed,)) for seed in range(threads)]
        for one in running:
            one.start()
        for one in running:
            one.join(LIMIT)
        if errors or any(one.is_alive() for one in running):
            raise RuntimeError("\n".join(errors) or "a thread hangs")
        return totals | self._when()

    def wait_usage(self, salt: str, most: int) -> dict[str, Any]:
        """Wait until LMCache's eviction has brought a salt below some bytes."""
        until = time.monotonic() + LIMIT
        while self.usage()["by_salt"].get(salt, 0) > most and time.monotonic() < until:
            time.sleep(0.05)
        return self.usage()

    def listed(self, page_size: int) -> dict[str, Any]:
        """The keys that the adapter lists, page by page."""
        found: list[str] = []
        cursor, pages = None, 0
        while True:
            page = self.adapter.list_l2_keys("tiny", page_size, cursor)
            found += [entry.key.chunk_hash_hex for entry in page.entries]
            pages += 1
            cursor = page.next_page_token
            if cursor is None:
                return {"keys": found, "pages": pages}

    def close(self) -> dict[str, Any]:
        """Close the manager, and the adapter a second time."""
        if self.manager is not None:
            adapter = self.adapter
            self.manager.close()
            adapter.close()
            self.manager = None
        return {}


def key_of(number: int, salt: str, group: int = 0) -> ObjectKey:
    """The key of a chunk."""
    name = hashlib.sha256(str(number).encode()).digest()
    return ObjectKey(name, "tiny", ObjectKey.ComputeKVRank(1, 0, 1, 0), group, salt)


def layout_of(dtype: str, shape: torch.Size = SHAPE) -> MemoryLayoutDesc:
    """The layout of a chunk."""
    return MemoryLayoutDesc([shape], [DTYPES[dtype]])


def payload(key: ObjectKey, shape: torch.Size = SHAPE) -> bytes:
    """The bytes of a chunk."""
    name = key.chunk_hash + key.cache_salt.encode() + bytes([key.object_group_id])
    seed, size = hashlib.sha256(name).digest(), shape.numel() * 2
    return (seed * (size // len(seed) + 1))[:size]


if __name__ == "__main__":
    from answer_lines import answer_on_output

    answer_on_output(Server())
