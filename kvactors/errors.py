"""Every error that the package raises."""

from __future__ import annotations


class KVActorsError(Exception):
    """Base of every error of this package."""


class ConfigError(KVActorsError, ValueError):
    """A setting is unknown, malformed or contradicts another. The message names it."""


class NoRoom(KVActorsError):
    """Not enough device blocks now, even after all possible evictions. Nothing was changed.
    `needed`, `available` and `pinned` count blocks, `reason` is empty or a phrase."""

    def __init__(self, needed: int, available: int, pinned: int = 0, reason: str = "") -> None:
        text = f"{_counted(needed, 'device block')} needed, {available} available"
        text += f", {pinned} pinned" if pinned else ""
        super().__init__(f"{text}: {reason}" if reason else text)
        self.needed = needed
        self.available = available
        self.pinned = pinned
        self.reason = reason


class NeverFits(NoRoom):
    """The request needs more blocks than the `total` of the device."""

    def __init__(self, needed: int, available: int, total: int) -> None:
        super().__init__(needed, available)
        blocks = _counted(total, "block")
        text = f"{self}: the device has {blocks} in all, so the request can never be admitted"
        self.args = (text,)
        self.total = total


class NumBlocksUnset(KVActorsError):
    """`device.num_blocks` is 0: call `set_num_blocks` first. Nothing was changed."""

    def __init__(self) -> None:
        super().__init__("device.num_blocks is 0: call set_num_blocks before the first request")


class DeadlineExceeded(KVActorsError, TimeoutError):
    """An operation was not answered before its deadline."""


class Paused(KVActorsError):
    """The cache is paused and did not resume before the deadline."""


class CacheAsleep(KVActorsError):
    """The cache sleeps, or is about to: `await cache.wake()` first. Nothing was changed."""

    def __init__(self, text: str = "the cache sleeps: await cache.wake() first") -> None:
        super().__init__(text)


class LeasesOpen(KVActorsError):
    """The cache cannot sleep: `leases` (a number) are open, or requests wait. Nothing was
    changed."""

    def __init__(self, leases: int) -> None:
        super().__init__(
            f"{_counted(leases, 'lease')} open, or requests wait for device blocks: finish them "
            "before sleep()"
        )
        self.leases = leases


class SleepUnsupported(KVActorsError):
    """A part of the cache cannot release its memory while the cache is open. Nothing was
    changed."""


class NotReady(KVActorsError):
    """The lease still waits for loads: await `wait_ready()` before computing or committing."""


class LeaseEnded(KVActorsError):
    """The lease was finished, preempted, abandoned, or lost in a restart."""


class LeaseBusy(KVActorsError, RuntimeError):
    """Another call on the lease has not returned: await it first."""


class TokensCommitted(KVActorsError, ValueError):
    """Tokens of committed blocks, or of full blocks shared by a fork, cannot be dropped."""


class WrongLoop(KVActorsError, RuntimeError):
    """A call from another event loop or thread than the cache's: use `cache.from_thread`."""


class WrongThread(KVActorsError, RuntimeError):
    """A call from a thread that is not the owner: `TierCache.adopt` changes it."""


class CacheClosed(KVActorsError):
    """The cache is not open (any more)."""


class NotOpened(CacheClosed, AttributeError):
    """What `kvactors.open` returns was used as a cache, without `async with`."""

    def __init__(
        self,
        text: str = "the cache is not open: write `async with kvactors.open(...) as cache:`, or "
        "`cache = await stack.enter_async_context(kvactors.open(...))` with a "
        "contextlib.AsyncExitStack",
    ) -> None:
        super().__init__(text)


class CacheFailed(KVActorsError):
    """The cache has failed permanently: close it and open another. `component` is the actor at
    fault, `__cause__` its last error."""

    def __init__(self, component: str, cause: BaseException | None = None) -> None:
        super().__init__(
            f"the cache has failed: {component} failed more often than "
            "actors.max_restarts_per_minute allows, "
            f"last with {cause!r}"
        )
        self.component = component
        self.__cause__ = cause


class ChannelClosed(KVActorsError):
    """The receiver of this channel has ended."""


class ActorFailed(KVActorsError):
    """`actor` failed while, or before, it handled an ask. `__cause__` is the exception."""

    def __init__(self, actor: str, cause: BaseException | None = None) -> None:
        super().__init__(f"actor {actor!r} failed" + (f": {cause!r}" if cause else ""))
        self.actor = actor
        self.__cause__ = cause


class WiringError(KVActorsError):
    """The declared channel graph is inconsistent. The message lists every contradiction."""


class LayoutError(KVActorsError, ValueError):
    """Shapes, dtypes or counts of blocks do not match."""


class DeviceError(KVActorsError):
    """A device cannot be used, or its memory has changed since its registration."""


class RankError(KVActorsError):
    """A tensor-parallel rank cannot join, or the leader cannot listen for it."""


class RankLost(RankError):
    """A rank has lost the memory of a lease's blocks: acquire again."""


class StoreError(KVActorsError, OSError):
    """A storage back end cannot do an operation."""


class StoreUnavailable(StoreError):
    """The back end does not answer."""


class StoreUnsupported(StoreError):
    """The configured store has no such operation. Nothing was changed."""


class SinkError(KVActorsError):
    """A flush sink did not accept a task."""


class SdkError(SinkError):
    """AttentionStore's SDK is not installed, or refused a call."""


class LeakedError(KVActorsError, RuntimeError):
    """A client library raised `__cause__`, which is no `Exception` (a CancelledError, a panic)."""


def as_exception(error: BaseException) -> Exception:
    """The error itself, or a LeakedError in place of one that has a special meaning in asyncio
    (CancelledError, StopIteration)."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    leaked = LeakedError(f"{type(error).__name__}: {error}")
    leaked.__cause__ = error
    return leaked


def ensure(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with a text unless an invariant holds, also under `python -O`, which
    removes `assert`."""
    if not holds:
        raise AssertionError(otherwise)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
