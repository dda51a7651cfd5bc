"""A request's hold on its device blocks: the lease that `KVCache.acquire` returns, and its hits."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvactors.actor import Ask
from kvactors.errors import LeaseEnded
from kvactors.native import Path
from kvactors.prefix_index.messages import Commit, Extend, Finish, Granted, LayerReady, Preempt, Ready

if TYPE_CHECKING:
    from kvactors.cache import KVCache


class Hits(NamedTuple):
    """Blocks of a request that need not be computed, by the tier that held them."""

    device: int
    host: int
    storage: int


class Lease:
    """A request's hold on its device blocks. Use it as an async context manager, or `finish` it.

    block_table: device block ids in order; final once `ready` has returned. cached_tokens: prefill from here on; before
    `ready` it counts loads on their way, afterwards those that landed. pending: whether there are such loads.
    """

    def __init__(self, cache: KVCache, lease: int, request_id: str, path: Path, granted: Granted) -> None:
        self.request_id = request_id
        self.block_table = granted.blocks
        self.cached_tokens = granted.cached_tokens
        self.pending = granted.pending
        self.hits = Hits(granted.device_hits, 0, 0)
        self.num_tokens = path.num_tokens
        self._cache = cache
        self._id = lease
        self._path = path
        self._ended = False

    async def ready(self, *, deadline: float | None = None) -> None:
        """Return when every load has landed or was demoted to a miss; `block_table` and `cached_tokens` are final then.

        Raises LeaseEnded, DeadlineExceeded, ActorFailed, and NoRoom if a failed load left blocks that could not be replaced.
        """
        if not self.pending:
            return
        landed = await self._ask(Ready(self._id), deadline)
        self.block_table, self.cached_tokens, self.pending = landed.blocks, landed.cached_tokens, False
        self.hits = Hits(landed.device_hits, landed.host_hits, landed.storage_hits)

    async def layer_ready(self, layer: int, *, deadline: float | None = None) -> int:
        """Return when one layer (counted from the layout's first, 0) of every load has landed, so that attention on it can start while later
        ones still load; layers land one by one with `device.layerwise`, else all at once. Returns the tokens that are cached in it.

        `ready` has the last word: if it says that fewer are cached, what was computed on top of the others must be thrown away.
        Raises ValueError for a layer that is not there, and what `ready` raises.
        """
        layout = self._cache.system.layout
        if not 0 <= layer < layout.num_layers + layout.extra_layers:
            raise ValueError(f"there is no layer {layer} of {layout.num_layers + layout.extra_layers}")
        if not self.pending:
            return self.cached_tokens
        return int(await self._ask(LayerReady(self._id, layer), deadline))

    async def extend(self, tokens: Any, *, deadline: float | None = None) -> tuple[int, ...]:
        """Append tokens (any integer buffer); returns the device blocks added to the table.

        Raises ValueError or TypeError for bad tokens, NoRoom, DeadlineExceeded, LeaseEnded, ActorFailed; then nothing changed.
        """
        checked = Path(self._cache.block_size, self._path.root)
        checked.extend(tokens)
        granted: Granted = await self._ask(Extend(self._id, tokens, checked.num_tokens), deadline)
        self.block_table += granted.blocks
        self.num_tokens += checked.num_tokens
        return granted.blocks

    async def commit(self, computed_tokens: int, *, deadline: float | None = None) -> int:
        """The first `computed_tokens` tokens are in device memory: their full blocks become shareable. Returns committed blocks.

        Raises NotReady, ValueError, DeadlineExceeded, LeaseEnded, ActorFailed.
        """
        return int((await self._ask(Commit(self._id, computed_tokens), deadline)).count)

    async def finish(self, *, deadline: float | None = None) -> None:
        """The request is over. Whatever happens, cancellation included, everything goes back."""
        await self._end(Finish(self._id), deadline)

    async def preempt(self, computed_tokens: int = 0, *, deadline: float | None = None) -> None:
        """The request gives way: the first `computed_tokens` tokens (or what was committed) stay cached, the rest goes back."""
        await self._end(Preempt(self._id, computed_tokens), deadline)

    def keys(self, start: int, stop: int) -> bytes:
        """Names of full blocks [start, stop), 32 bytes each."""
        return self._path.keys(start, stop)

    async def _ask(self, message: Ask[Any], deadline: float | None) -> Any:
        if self._ended:
            raise LeaseEnded(f"lease of {self.request_id!r} has ended")
        return await self._cache.ask(message, deadline)

    async def _end(self, message: Ask[Any], deadline: float | None) -> None:
        try:
            await self._ask(message, deadline)
        except ValueError:
            raise  # the message was refused: the lease goes on
        except BaseException:
            self.abandon()
            raise
        self._ended = True

    def abandon(self) -> None:
        """Give everything back without waiting for an answer. Harmless on a lease that has ended."""
        if not self._ended:
            self._ended = True
            self._cache.abandon(self._id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if error is None:
            await self.finish()
        else:
            self.abandon()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self._ended = True
            if self._cache.abandon_from_anywhere(self._id):
                warnings.warn(f"lease of {self.request_id!r} was never finished", ResourceWarning, source=self, stacklevel=1)
