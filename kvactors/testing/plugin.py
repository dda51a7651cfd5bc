"""The pytest plugin. It is installed with kvactors. `-p kvactors.testing` loads it from a checkout.

Fixtures: `kv_seed` and `kv_sim`, once for each seed. `kv_faults`, the faults of `kv_sim`.
`kv_cache`, a small cache on the running loop. `kv_config`, to be overridden: settings in place of
the small ones. `kv_device`, too: the device of `kv_cache`.
A failed test of a simulated run reports its seed, the messages that concern the request that
failed, and the command that replays it.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvactors.cache import KVCache
    from kvactors.device import Device
    from kvactors.testing.plan import SimFaults
    from kvactors.testing.sim import Sim

# kvactors itself is imported where it is used: the plugin is loaded by every pytest in whose
# environment it is installed.

TAIL = 40
"""Messages of a trace that are shown when no request is to blame."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    group = parser.getgroup("kvactors", "simulated runs of kvactors")
    group.addoption(
        "--kv-seeds",
        type=positive,
        default=5,
        metavar="N",
        help="run simulated tests with seeds 0 to N - 1 (5)",
    )
    group.addoption(
        "--kv-seed",
        type=int,
        default=None,
        metavar="S",
        help="run simulated tests with this seed alone",
    )


def positive(text: str) -> int:
    """A number of seeds. ArgumentTypeError below 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that needs `kv_seed`, or a fixture made from it, runs once for each seed."""
    if "kv_seed" in metafunc.fixturenames:
        only, count = (
            metafunc.config.getoption("--kv-seed"),
            metafunc.config.getoption("--kv-seeds"),
        )
        seeds = range(count) if only is None else [only]
        metafunc.parametrize("kv_seed", seeds, ids=[f"seed{seed}" for seed in seeds])


@pytest.fixture
def kv_config() -> dict[str, dict[str, Any]]:
    """Tables of settings in place of those of `kvactors.testing.SMALL`: override it in a module or
    conftest."""
    return {}


@pytest.fixture
def kv_device() -> Device | None:
    """The device of `kv_cache`, as of `kvactors.open`: override it for an engine with tensors. Its
    layout, block size and number of blocks replace the small ones."""
    return None


@pytest.fixture
def kv_sim(kv_seed: int, kv_config: dict[str, dict[str, Any]]) -> Sim:
    """A simulated run, see `kvactors.testing.Sim`."""
    from kvactors.testing.sim import Sim

    return Sim(kv_seed, **kv_config)


@pytest.fixture
def kv_faults(kv_sim: Sim) -> SimFaults:
    """The faults of `kv_sim`, see `kvactors.testing.SimFaults`."""
    return kv_sim.faults


def _async_fixture() -> Callable[[Any], Any]:
    """pytest-asyncio's own decorator where it is installed, so that its strict mode accepts
    the fixture. anyio's plugin takes either."""
    if importlib.util.find_spec("pytest_asyncio") is None:
        return pytest.fixture
    import pytest_asyncio

    return pytest_asyncio.fixture


@_async_fixture()
async def kv_cache(
    kv_config: dict[str, dict[str, Any]], kv_device: Device | None
) -> AsyncIterator[KVCache]:
    """A small cache with real copies on the running loop. At the end of the test it must become
    idle (see `kvactors.testing.Sim.open`)."""
    from kvactors.opening import open_cache
    from kvactors.testing.sim import check_at_rest, small_config, watch_leases

    sinks = {"flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]}}
    config = small_config(kv_device, **{**sinks, **kv_config})
    async with open_cache(config, kv_device) as cache:
        forgotten = watch_leases(cache)
        yield cache
        await check_at_rest(cache, forgotten)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed simulated test tells its seed, its messages, and how to replay it."""
    report = yield
    sim = getattr(item, "funcargs", {}).get("kv_sim")
    if report.failed and call.excinfo is not None and sim is not None:
        report.sections.append(("kvactors", "\n".join(story(sim, item.nodeid, call.excinfo.value))))
    return report


def story(sim: Sim, nodeid: str, error: BaseException) -> Iterator[str]:
    """The lines of a failure's report."""
    from kvactors.testing.trace import minimal, render

    yield f"seed {sim.seed}; replay it: pytest {shlex.quote(nodeid)} --kv-seed {sim.seed}"
    if sim.loop is not None and sim.loop.stalled:
        yield from ["", *sim.loop.stalled]
    trace = sim.trace
    if not trace.records:
        return
    request = request_of(error)
    records = minimal(trace, request=request) if request is not None else []
    if records:
        yield f"\nof {trace.count} messages the {len(records)} that concern request {request}:"
    else:
        records = list(trace.records)[-TAIL:]
        yield f"\nof {trace.count} messages the last {len(records)}:"
    yield render(records)


def request_of(error: BaseException) -> str | None:
    """The request at whose lease the error arose: one that was never ended, or that of the
    innermost frame that acquires or holds a lease. None if there is none."""
    from kvactors.cache import KVCache
    from kvactors.lease import Lease
    from kvactors.testing.sim import Unclean

    if isinstance(error, Unclean):
        return next(iter(error.requests), None)
    if isinstance(error, BaseExceptionGroup):
        return next(
            (found for inner in error.exceptions if (found := request_of(inner)) is not None), None
        )
    for trace in reversed(list(_links(error.__traceback__))):
        names = trace.tb_frame.f_locals
        if trace.tb_frame.f_code is KVCache.acquire.__code__:
            return str(names["request_id"])
        for value in names.values():
            if isinstance(value, Lease):
                return value.request_id
    return None


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
