"""Calls of an open cache on its tenants: what belongs to a salt, or to all of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors.arguments import (
    Media,
    check_flag,
    check_int,
    check_optional_text,
    check_text,
    request_path,
    request_scope,
)
from kvactors.errors import ConfigError, StoreUnsupported
from kvactors.open_cache import OpenCache
from kvactors.prefix_index.messages import ChangeShares, Clear, SetQuota, Unpin
from kvactors.quota_settings import quota_in_blocks
from kvactors.types import Tokens


async def clear(
    self: OpenCache,
    *,
    storage: bool = False,
    salt: str | None = None,
    lora: str | None = None,
    deadline: float | None = None,
) -> int:
    """Drop every cached block. Leases in use keep theirs, which cannot be hit any more.

    Args:
        self: the cache.
        storage: empty the store as well.
        salt: drop only the blocks of requests with this salt, under every namespace and adapter.
            None: all blocks.
        lora: drop only the blocks of requests with this adapter, under every namespace and salt,
            because its weights are others now. Later requests find none of them in any tier, and
            indexes are sent them as gone. Their memory is freed as other blocks need it. A new
            process finds stored blocks of the name again: see docs/how-to/share_a_cache.md.
        deadline: seconds from now.

    Returns:
        Device blocks that the call has freed. 0 with `lora`.

    Raises:
        ValueError: salt and lora are both given.
        StoreUnsupported: the store has no such operation (AttentionStore), or stored blocks of one
            salt or adapter were to be removed, which no store can tell from others. No tier was
            cleared. Use
            `set_namespace` or another `attention_store.model_version`.
    """
    at = self._client.deadline(deadline)
    check_optional_text("salt", salt)
    if check_optional_text("lora", lora) is not None and salt is not None:
        raise ValueError("salt and lora are given: clear one after the other")
    if check_flag("storage", storage) and self.system.device_store is not None:
        raise StoreUnsupported(
            f"storage.backend {self.config.storage.backend!r} has no call that removes blocks, "
            "so nothing was cleared: clear without "
            "storage=True, and set_namespace() or another attention_store.model_version keeps "
            "what it holds from being hit"
        )
    if storage and (salt, lora) != (None, None) and self.system.store is not None:
        raise StoreUnsupported(
            f"storage.backend {self.config.storage.backend!r} does not have the salts and adapters "
            "of all its blocks, so it cannot remove those of one, and nothing was cleared: clear "
            "without storage=True, or the whole store without salt and lora"
        )
    return int((await self._client.ask(Clear(storage, salt, lora), at)).count)


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
        device: device blocks, or bytes such as "8 GiB". None: no limit.
        host: as `device`, in the host tier.
        storage: as `device`, in the store. Blocks that were written while there was no quota of the
            store count to no salt.
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
