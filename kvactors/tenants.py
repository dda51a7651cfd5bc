"""Calls of an open cache on its tenants: what belongs to a salt, or to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvactors.actor.clock import now
from kvactors.arguments import (
    Media,
    check_flag,
    check_int,
    check_optional_text,
    check_text,
    request_path,
    request_scope,
)
from kvactors.capacity import quota_in_blocks
from kvactors.errors import ConfigError, StoreError, StoreUnsupported
from kvactors.open_cache import OpenCache
from kvactors.prefix_index.messages import ChangeShares, Clear, SetQuota, Unpin
from kvactors.types import Tokens


class Cleared(NamedTuple):
    """The result of a clear.

    Attributes:
        device_blocks: device blocks that it has freed. 0 with `lora`.
        unknown_objects: objects that a clear of a salt has left in the store, because they were
            written before stores kept the salt of each object.
    """

    device_blocks: int
    unknown_objects: int


async def clear(
    self: OpenCache,
    *,
    storage: bool = False,
    erase: bool = False,
    salt: str | None = None,
    lora: str | None = None,
    deadline: float | None = None,
) -> Cleared:
    """Drop every cached block. Leases in use keep theirs, which cannot be hit any more.

    Args:
        self: the cache.
        storage: clear the store as well.
        erase: overwrite the bytes of every object that has left the store, with `storage` (see
            docs/how-to/erase_a_tenant.md).
        salt: drop only the blocks of requests with this salt, under every namespace and adapter.
            None: all blocks.
        lora: drop only the blocks of requests with this adapter, under every namespace and salt,
            because its weights are others now. Later requests find none of them in any tier, and
            indexes are sent them as gone. Their memory is freed as other blocks need it. A new
            process finds stored blocks of the name again: see docs/how-to/share_a_cache.md.
        deadline: seconds from now.

    Returns:
        The blocks that the call has freed, and the objects that it has left.

    Raises:
        ValueError: salt and lora are both given, or erase without storage.
        StoreUnsupported: the store cannot do it. No tier was cleared.
        StoreError: objects from before may still be found, or bytes were not overwritten. Call it
            again.
    """
    at = self._client.deadline(deadline)
    check_optional_text("salt", salt)
    if check_optional_text("lora", lora) is not None and salt is not None:
        raise ValueError("salt and lora are given: clear one after the other")
    check_flag("storage", storage)
    if check_flag("erase", erase) and not storage:
        raise ValueError("erase=True overwrites objects of the store: give storage=True as well")
    if storage:
        _check_clears(self, salt, lora, erase=erase)
    done = await self._client.ask(Clear(storage, salt, lora), at)
    store = self.system.store
    if erase and store is not None:
        left = await store.wipe(lambda: now() >= at or not self._client.is_open)
        if left:
            self._client.check_call()
            raise StoreError(
                f"the store was cleared, and bytes of objects that have left it remain: {left}. "
                "Call it again"
            )
    return Cleared(done.count, done.unknown)


def _check_clears(self: OpenCache, salt: str | None, lora: str | None, *, erase: bool) -> None:
    """StoreUnsupported if the store cannot carry out such a clear."""
    backend, store = self.config.storage.backend, self.system.store
    if self.system.device_store is not None and salt is None:  # it has no blocks under a salt
        raise StoreUnsupported(
            f"storage.backend {backend!r} has no call that removes blocks, "
            "so nothing was cleared: clear without "
            "storage=True, and set_namespace() or another attention_store.model_version keeps "
            "what it holds from being hit"
        )
    if lora is not None and store is not None:
        raise StoreUnsupported(
            f"storage.backend {backend!r} does not have the adapters of its objects, so it cannot "
            "remove those of one, and nothing was cleared: clear without storage=True, or the "
            "whole store without lora"
        )
    if salt is not None and store is not None and store.shares is None:
        raise StoreUnsupported(
            f"storage.backend {backend!r} does not have the salts of its objects here (a file "
            "store of one process that may write has them), so nothing was cleared. Its objects of "
            "this salt stay, and only requests with this salt hit them: clear without storage=True "
            "and give the tenant another salt, or clear the whole store without salt"
        )
    if erase and store is not None and not getattr(store.inner, "wipes", False):
        raise StoreUnsupported(
            f"storage.backend {backend!r} does not overwrite objects that have left it, so nothing "
            "was cleared: clear without erase=True"
        )


async def set_quota(
    self: OpenCache,
    salt: str,
    *,
    device: int | str | None = None,
    host: int | str | None = None,
    storage: int | str | None = None,
    deadline: float | None = None,
) -> None:
    """Change the most resident blocks of a salt, beyond which its own blocks are evicted first. No
    block leaves at once.

    Args:
        self: the cache.
        salt: as in `acquire`.
        device: device blocks, or bytes such as "8 GiB". None: no limit. A quota without limits
            ends, with the counters of the salt, unless the settings have limits for all salts.
        host: as `device`, in the host tier.
        storage: as `device`, in the store. Objects that were written before stores kept the salt
            of each object count to no salt.
        deadline: seconds from now.

    Raises:
        ValueError: a size is malformed, or holds no block.
        StoreUnsupported: the store cannot keep a quota. Nothing has changed.
    """
    at = self._client.deadline(deadline)
    check_text("salt", salt)
    block_bytes = self.system.layout.block_bytes
    for name, size in (("device", device), ("host", host), ("storage", storage)):
        if size is not None and not isinstance(size, str):
            check_int(name, size, 1, 1 << 31)
    try:
        quota = quota_in_blocks(
            "set_quota", (device, host, storage), block_bytes, self.system.object_bytes
        )
    except ConfigError as error:
        raise ValueError(str(error)) from None
    store = self.system.store
    if storage is not None and (store is None or store.shares is None):
        raise StoreUnsupported(
            f"storage.backend {self.config.storage.backend!r} keeps no quota of a salt, and "
            "nothing has changed: storage.backend = 'file' in one rank keeps it"
        )
    await self._client.ask(ChangeShares(SetQuota(salt, quota)), at)


async def unpin(
    self: OpenCache,
    tokens: Tokens,
    *,
    extra_keys: Sequence[Media] = (),
    salt: str | None = None,
    lora: str | None = None,
    deadline: float | None = None,
) -> int:
    """End the pin of exactly the full blocks of `tokens`. They are evicted like others from now on.

    Args:
        self: the cache.
        tokens: the prompt of the request that pinned them, with its output if the pin was a hint of
            `Lease.finish`.
        extra_keys: as in `acquire`.
        salt: as in `acquire`.
        lora: as in `acquire`.
        deadline: seconds from now.

    Returns:
        The blocks, 0 if they were not pinned as one path.
    """
    at = self._client.deadline(deadline)
    scope = request_scope(salt, lora)
    path, _ = request_path(self.block_size, self.system.roots.root(scope), tokens, extra_keys)
    return int((await self._client.ask(ChangeShares(Unpin(path, scope)), at)).count)
