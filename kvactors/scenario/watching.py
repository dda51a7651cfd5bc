"""Observers that the options of `run` and `replay` ask for: recorder, trace, endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvactors.cache import KVCache
from kvactors.errors import ConfigError
from kvactors.scenario.output import write_output

if TYPE_CHECKING:
    from kvactors.monitoring import Endpoint


class Watching:
    """Observes a run.

    Args:
        observers: further observers.
        trace: file for a trace, None for none.
        port: of the endpoint for metrics and health, None for none.
        host: address that the endpoint listens on.
        virtual: the run has no real clock.

    Raises:
        ConfigError: the options do not go together, or a package is missing.
    """

    def __init__(
        self,
        *observers: Observe,
        trace: Path | None,
        port: int | None,
        host: str,
        virtual: bool = False,
    ) -> None:
        self._observers = list(observers)
        self._file, self._trace = trace, None
        self._asked, self._seen = trace is not None or port is not None, False
        if trace is not None:
            from kvactors.observe.chrome_trace import ChromeTrace

            self._trace = ChromeTrace()
            self._observers.append(self._trace.observing)
        if port is not None:
            if virtual:
                raise ConfigError(
                    "--metrics-port needs a run on the real clock: leave out --virtual"
                )
            self._observers.append(partial(_endpoint().attached, host, port))

    @asynccontextmanager
    async def observing(self, cache: KVCache) -> AsyncIterator[None]:
        """Enter every observer with an open cache."""
        self._seen = True
        async with AsyncExitStack() as stack:
            for observe in self._observers:
                await stack.enter_async_context(observe(cache))
            yield

    def write(self) -> None:
        """Write the trace of the run that has ended.

        Raises:
            ConfigError: the run could not be observed.
        """
        if self._asked and not self._seen:
            raise ConfigError(
                "a scenario that kills its processes cannot be observed by --trace and "
                "--metrics-port"
            )
        if self._trace is not None and self._file is not None:
            write_output(self._trace.encode(), self._file)


def _endpoint() -> Endpoint:
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--metrics-port needs prometheus_client: pip install 'kvactors[metrics]'"
        ) from error
    from kvactors.monitoring import Endpoint

    return Endpoint()


Observe: TypeAlias = Callable[[KVCache], AbstractAsyncContextManager[Any]]
"""Entered with the open cache of a run, and left before it closes."""


def unobserved(_: KVCache) -> AbstractAsyncContextManager[Any]:
    """Nothing looks at the run."""
    return nullcontext()
