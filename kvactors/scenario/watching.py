"""What `run` and `replay` observe and write: reports, pages, traces, an endpoint."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from kvactors.cache import KVCache
from kvactors.errors import ConfigError
from kvactors.observe.chrome_trace import ChromeTrace
from kvactors.scenario.engine import Observe
from kvactors.scenario.output import need, to_stdout, write_json, write_output
from kvactors.scenario.pages import check_charts, run_page, write_page
from kvactors.scenario.recorder import Recorder
from kvactors.scenario.report import Report, print_report
from kvactors.settings import Config


class Watching:
    """Observes a run, and writes what its options ask for."""

    def __init__(
        self,
        *,
        json: Path | None = None,
        html: Path | None = None,
        trace: Path | None = None,
        port: int | None = None,
        host: str = "",
        virtual: bool = False,
    ) -> None:
        self._json, self._html, self._trace_file = json, html, trace
        self._observers: list[Observe] = []
        self._asked, self._seen = trace is not None or port is not None, False
        if html is not None:
            check_charts()
            self._recorder = Recorder()
            self._observers.append(self._recorder.observing)
        if trace is not None:
            self._trace = ChromeTrace()
            self._observers.append(self._trace.observing)
        if port is not None:
            if virtual:
                raise ConfigError(
                    "--metrics-port needs a run on the real clock: leave out --virtual"
                )
            need("prometheus_client", "--metrics-port needs prometheus_client", "metrics")
            from kvactors.observe.http_endpoint import HttpEndpoint

            self._observers.append(partial(HttpEndpoint().attached, host, port))

    @asynccontextmanager
    async def observing(self, cache: KVCache) -> AsyncIterator[None]:
        self._seen = True
        async with AsyncExitStack() as stack:
            for observe in self._observers:
                await stack.enter_async_context(observe(cache))
            yield

    def write_trace(self) -> None:
        if self._asked and not self._seen:
            raise ConfigError(
                "a scenario that kills its processes cannot be observed by --trace and "
                "--metrics-port"
            )
        if self._trace_file is not None:
            write_output(self._trace.encode(), self._trace_file)

    def conclude(self, report: Report, settings: Config, failed: list[str]) -> int:
        """Print and write the report of the run that has ended. Returns the exit status: 1 if
        anything failed."""
        if self._html is not None:
            page = run_page(report, self._recorder.recording, msgspec.to_builtins(settings))
            write_page(page, self._html)
        files = (self._json, self._html, self._trace_file)
        print_report(report, Console(stderr=any(map(to_stdout, files))))
        if self._json is not None:
            write_json(report, self._json)
        for what in failed:
            print(f"not as expected: {what}", file=sys.stderr)
        return 1 if failed else 0
