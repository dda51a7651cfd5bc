"""The command `kvactors top`."""

from __future__ import annotations

import math
import time
from typing import Annotated

import anyio
import msgspec
from cyclopts import Parameter

from kvactors.actor.clock import now
from kvactors.errors import ConfigError
from kvactors.scenario.output import Output
from kvactors.signals import run_terminable
from kvactors.top.exposition import BadMetrics, Metrics, read_metrics
from kvactors.top.fetch import Target, Unreachable, fetch, parse_target
from kvactors.top.outputs import Show, output
from kvactors.top.view import Health, Reading, Readings, View

STEP = 0.1
"""Seconds between two looks at the terminal."""

LEAST, MOST = 0.25, 3600.0
"""Limits of the interval in seconds. The endpoint renders metrics at most four times a second."""


def top(
    url: str = "9464",
    *,
    interval: float = 2.0,
    timeout: float = 5.0,
    once: Annotated[bool, Parameter(negative="")] = False,
    json: Output | None = None,
) -> int:
    """Show the state of a running process: health, occupancy and hit rates of the tiers, transfers,
    latencies, leases, sinks and actors. It reads /metrics and /health of the process. q or Ctrl-C
    ends it. Without a terminal the frames are plain text, one after another.

    Parameters
    ----------
    url
        Address of the process: a port of this machine, host:port, or the URL of its metrics.
    interval
        Seconds between two frames. Rates are those of the last interval.
    timeout
        Seconds that a request to the process may take.
    once
        Print one frame as plain text, after one interval, and end. The exit status is 1 unless the
        status is ok or degraded.
    json
        Where to write the values in place of frames, one JSON object a line.
    """
    target = parse_target(url)
    for name, value, least in (("--interval", interval, LEAST), ("--timeout", timeout, 0.0)):
        if not (math.isfinite(value) and least <= value <= MOST and value > 0):
            raise ConfigError(f"{name} must be {least or 'above 0'} to {MOST:g} s, not {value:g}")
    with output(json, once=once) as show:
        view = run_terminable(watch(target, show, interval=interval, timeout=timeout, once=once))
    return 0 if view is None or view.status in ("ok", "degraded") else 1


async def watch(
    target: Target, show: Show, *, interval: float, timeout: float, once: bool
) -> View | None:
    """Read a process and show it, until the user ends it or after the second reading.

    Args:
        target: address of the metrics.
        show: shows a view.
        interval: seconds between two readings.
        timeout: seconds that a request may take.
        once: show the second reading alone, and end.

    Returns:
        The view that was shown with `once`, else None.

    Raises:
        Unreachable, BadMetrics: at the first reading, or with `once`.
    """
    readings, url = Readings(), str(target)
    readings.add(await read(target, timeout))
    if not once:
        show.view(readings.view(url, time.time()))
    while True:
        due = now() + interval
        while (left := due - now()) > 0:
            await anyio.sleep(min(left, STEP))
            if show.ended():
                return None
        try:
            readings.add(await read(target, timeout))
            view = readings.view(url, time.time())
        except (Unreachable, BadMetrics) as error:
            if once:
                raise
            readings.lost()
            view = readings.unreachable(url, time.time(), str(error))
        show.view(view)
        if once:
            return view


async def read(target: Target, timeout: float) -> Reading:
    """One reading of a process.

    Raises:
        Unreachable: it does not answer.
        BadMetrics: it answers with something else.
    """
    answer = await fetch(target, timeout)
    if answer.status != 200:
        raise Unreachable(f"{target} answers with status {answer.status}")
    try:
        metrics = read_metrics(answer.body.decode())
    except (BadMetrics, UnicodeDecodeError) as error:
        raise BadMetrics(f"{target} has no metrics of a kvactors cache: {error}") from error
    return Reading(now(), metrics, await _health(target.beside("health"), timeout, metrics))


async def _health(target: Target, timeout: float, metrics: Metrics) -> Health | None:
    """The health with its reasons. None for a process without a path of this kind: the metrics have
    the status too."""
    if "health" not in metrics:
        return None
    try:
        answer = await fetch(target, timeout)
        return msgspec.json.decode(answer.body, type=Health)
    except (Unreachable, msgspec.DecodeError, UnicodeDecodeError):
        return None
