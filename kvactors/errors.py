"""Every error the package raises.

KVActorsError
├── ConfigError (ValueError)          a setting is unknown, malformed or contradicts another
├── NoRoom                            not enough device blocks, even after evicting everything that
may go
├── DeadlineExceeded (TimeoutError)   an operation was not answered in time
├── Paused                            the cache is paused and the deadline passed before it resumed
├── NotReady                          the lease still waits for loads: await wait_ready() first
├── LeaseEnded                        the lease was finished, preempted or given back already, or
lost in a restart
├── LeaseBusy (RuntimeError)          another call on the lease has not returned yet
├── WrongLoop (RuntimeError)          a call from another event loop or thread than the cache's
├── WrongThread (RuntimeError)        a call of a TierCache from another thread than its owner's
├── CacheClosed                       the cache is not open (any more)
├── CacheFailed                       an actor failed more often than actors.restarts allows, and no
part that can be switched off
├── ChannelError
│   └── ChannelClosed                 the receiver of this channel has ended
├── LeakedError (RuntimeError)        code of a client library raised what is not an Exception
├── ActorFailed                       an actor failed while (or before) it handled an ask
├── WiringError                       the declared channel graph does not fit together
├── LayoutError (ValueError)          shapes, dtypes or counts of blocks do not fit
├── DeviceError                       a device cannot be had, or its memory is not what it was
│   └── CudaError                     (data_plane.cuda.driver) a call of the CUDA driver failed
├── RankError                         a tensor-parallel rank cannot be admitted, or nobody can
listen for it
│   └── RankLost                      a rank's memory is gone, and with it what a lease's blocks
held
├── StoreError (OSError)              a storage back end cannot do what was asked
│   ├── StoreUnavailable              the back end does not answer
│   └── StoreUnsupported              the configured store has no such operation
└── SinkError                         a flush sink did not take a task
    └── SdkError                      AttentionStore's SDK is not there, or refused a call
"""

from __future__ import annotations


class KVActorsError(Exception):
    """Base of every error of this package."""


class ConfigError(KVActorsError, ValueError):
    """A setting is unknown, malformed or contradicts another. The message names it."""


class NoRoom(KVActorsError):
    """Not enough device blocks. `needed` and `available` count blocks. Nothing was changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} device blocks needed, {available} can be had")
        self.needed = needed
        self.available = available


class DeadlineExceeded(KVActorsError, TimeoutError):
    """An operation was not answered before its deadline."""


class Paused(KVActorsError):
    """The cache is paused and did not resume before the deadline."""


class NotReady(KVActorsError):
    """The lease still waits for loads: await `wait_ready()` before computing or committing."""


class LeaseEnded(KVActorsError):
    """The lease was finished, preempted or given back already, or its cache lost it in a
    restart."""


class LeaseBusy(KVActorsError, RuntimeError):
    """Another call on the lease has not returned yet: await it first."""


class WrongLoop(KVActorsError, RuntimeError):
    """A call from another event loop or thread than the cache's: use `cache.from_thread` in other
    threads."""


class WrongThread(KVActorsError, RuntimeError):
    """A call from another thread than the owner's: `TierCache.adopt` changes the owner."""


class CacheClosed(KVActorsError):
    """The cache is not open (any more)."""


class CacheFailed(KVActorsError):
    """The cache has failed for good: close it and open another. `component` is the actor that
    failed too often, `__cause__` its last error."""

    def __init__(self, component: str, cause: BaseException | None = None) -> None:
        super().__init__(
            f"the cache has failed: {component} failed more often than actors.restarts allows, "
            f"last with {cause!r}"
        )
        self.component = component
        self.__cause__ = cause


class ChannelError(KVActorsError):
    """Base of channel errors."""


class ChannelClosed(ChannelError):
    """The receiver of this channel has ended."""


class ActorFailed(KVActorsError):
    """An actor failed while, or before, it handled an ask. `actor` is its name, `__cause__` what
    killed it."""

    def __init__(self, actor: str, cause: BaseException | None = None) -> None:
        super().__init__(f"actor {actor!r} failed" + (f": {cause!r}" if cause else ""))
        self.actor = actor
        self.__cause__ = cause


class WiringError(KVActorsError):
    """The declared channel graph does not fit together. The message lists every misfit."""


class LayoutError(KVActorsError, ValueError):
    """Shapes, dtypes or counts of blocks do not fit."""


class DeviceError(KVActorsError):
    """A device cannot be had, or its memory is not what it was when it was registered."""


class RankError(KVActorsError):
    """A tensor-parallel rank cannot be admitted, or nobody can listen for it."""


class RankLost(RankError):
    """A rank's memory is gone, and with it what a lease's blocks held there: acquire again."""


class StoreError(KVActorsError, OSError):
    """A storage back end cannot do what was asked."""


class StoreUnavailable(StoreError):
    """The back end does not answer."""


class StoreUnsupported(StoreError):
    """The configured store has no such operation. Nothing was changed."""


class SinkError(KVActorsError):
    """A flush sink did not take a task."""


class SdkError(SinkError):
    """AttentionStore's SDK is not there, or refused a call."""


class LeakedError(KVActorsError, RuntimeError):
    """A client library raised an exception that is not an `Exception` (a leaked CancelledError, a
    panic); `__cause__` is that exception."""


def as_exception(error: BaseException) -> Exception:
    """The error itself, or a LeakedError in place of one that asyncio gives a meaning of its own
    (CancelledError, StopIteration)."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    leaked = LeakedError(f"{type(error).__name__}: {error}")
    leaked.__cause__ = error
    return leaked
