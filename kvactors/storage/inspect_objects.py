"""The stores of objects under a URL: what they hold, and removal of the oldest objects. Other nodes
may use them meanwhile: what is removed is a miss."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from kvactors.errors import ConfigError, StoreError
from kvactors.settings.tables import StorageConfig
from kvactors.storage.header import HEADER, VERSION
from kvactors.storage.inspect import Inspection, Pruned
from kvactors.storage.object import (
    PAGE_LIMIT_S,
    ROOT,
    Listed,
    delete_listed,
    files_below,
    list_objects,
    open_store,
    reason,
)

LEFT_OVER_S = 3600.0
"""Age of a temporary file whose process must have been killed."""


class Objects(NamedTuple):
    """Objects that are counted together. minute: of their last writing, since 1970."""

    store: str
    size: int
    minute: int


def objects_of(listed: Listed) -> Objects:
    """What an object of a listing counts to."""
    store = listed.name.rsplit("/", 2)[0]
    return Objects(store, listed.size, int(listed.written_at // 60))


def store_at(url: str) -> Any:
    """The library's store. ConfigError, StoreError."""
    settings = StorageConfig(backend="object", url=url, timeout_s=PAGE_LIMIT_S)
    if fault := settings.url_fault():
        raise ConfigError(fault)
    return open_store(settings)


async def inspect_objects(url: str) -> list[Inspection]:
    """Every store under a URL. The time of the last write stands for that of the last opening.
    ConfigError, StoreError."""
    stores: dict[str, Counter[Objects]] = {}
    for one, count in (await count_objects(url)).items():
        stores.setdefault(one.store, Counter())[one] = count
    return [described(path, found) for path, found in sorted(stores.items())]


async def count_objects(url: str) -> Counter[Objects]:
    """The objects under a URL, of which there must be some."""
    store, found = store_at(url), Counter[Objects]()
    try:
        async for page in list_objects(store, ROOT):
            found.update(map(objects_of, page))
    except Exception as error:
        raise StoreError(f"{url} cannot be listed: {reason(error)}") from error
    if not found:
        raise StoreError(f"{url}: no objects of kvactors here")
    return found


def described(path: str, found: Counter[Objects]) -> Inspection:
    """A store."""
    _, model, namespace, rank, digest = path.split("/")
    number, ranks = map(int, rank.split("-")[1::2])
    names = (model, unquote(namespace), number, ranks, digest)
    nbytes = sum(one.size * count for one, count in found.items())
    return Inspection(
        path,
        "ok",
        VERSION,
        *names,
        block_bytes=max(one.size for one in found) - HEADER.size,
        objects=found.total(),
        bytes=nbytes,
        slab_bytes=nbytes,
        opened_at=60.0 * max(one.minute for one in found),
    )


async def prune_objects(
    url: str, max_bytes: int, namespace: str | None = None, *, dry_run: bool = False
) -> list[Pruned]:
    """Remove the oldest objects under a URL, those of one minute together, until the others have at
    most `max_bytes` bytes. namespace: only its objects are counted and removed. ConfigError,
    StoreError."""
    found = {
        one: one.size * count
        for one, count in (await count_objects(url)).items()
        if namespace in (None, unquote(one.store.split("/")[2]))
    }
    left, gone = sum(found.values()), Counter[str]()
    last = -1
    for one in sorted(found, key=lambda one: one.minute):
        if left <= max_bytes and one.minute > last:
            break
        last, left = one.minute, left - found[one]
        gone[one.store] += found[one]

    def is_old(listed: Listed) -> bool:
        one = objects_of(listed)
        return one.store in gone and one.minute <= last

    if not dry_run:
        store = store_at(url)
        await delete_listed(store, ROOT, is_old)
        remove_left_over(store.prefix)
    why = f"the oldest beyond {max_bytes:,} bytes"
    return [Pruned(path, why, nbytes, True) for path, nbytes in sorted(gone.items())]


def remove_left_over(folder: Any) -> None:
    """Remove the temporary files that processes that were killed have left in a folder."""
    for one in files_below(folder, ROOT) if isinstance(folder, Path) else ():
        if "#" in one.name and one.written_at < time.time() - LEFT_OVER_S:
            (folder / one.name).unlink(missing_ok=True)  # its write may have ended
