"""Calls of an open cache on its tenants: what belongs to a salt, or to all of them."""

from __future__ import annotations

from kvactors.arguments import check_flag
from kvactors.errors import StoreUnsupported
from kvactors.open_cache import OpenCache
from kvactors.prefix_index.messages import Clear


async def clear(self: OpenCache, *, storage: bool = False, deadline: float | None = None) -> int:
    """Drop every cached block. Leases in use keep theirs, which cannot be hit any more.

    Args:
        self: the cache.
        storage: empty the store as well.
        deadline: seconds from now.

    Returns:
        Device blocks that became free at once.

    Raises:
        StoreUnsupported: the store has no such operation (AttentionStore), and no tier was
            cleared. Use `set_namespace` or another `attention_store.model_version`.
    """
    at = self._client.deadline(deadline)
    if check_flag("storage", storage) and self.system.device_store is not None:
        raise StoreUnsupported(
            f"storage.backend {self.config.storage.backend!r} has no call that removes blocks, "
            "so nothing was cleared: clear without "
            "storage=True, and set_namespace() or another attention_store.model_version keeps "
            "what it holds from being hit"
        )
    return int((await self._client.ask(Clear(storage), at)).count)
