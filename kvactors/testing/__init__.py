"""Test support: your serving loop against a simulated cache.

The parts are documented where they are defined (and by example in docs/testing_your_loop.md):

- `SimLoop`, `simulate`, `loop_factory`: asyncio in virtual time and in an order drawn from a seed;
  `Deadlock`, `Livelock`.
- `Sim`: a whole cache in such a loop, with copies and a store that take time. `SimFaults`,
  `FaultPlan`, `Fault`: its faults. `Unclean`: the problems found at the end. `small_config`:
  settings for tests.
- `Trace`, `minimal`, `render`: every message between the actors.
- `SinkContract`, `StoreContract`, `LayoutContract`: conformance suites of sinks, back ends and
  layouts of other packages.
- The pytest plugin `kvactors.testing.plugin`: fixtures `kv_sim`, `kv_cache`, `kv_faults`, options
  `--kv-seeds`, `--kv-seed`. It is loaded where kvactors is installed. `pytest -p kvactors.testing`
  loads it from a checkout. Nothing else in this package needs pytest.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from kvactors.testing.faults import Fault as Fault
    from kvactors.testing.layout_contract import LayoutContract as LayoutContract
    from kvactors.testing.loop import Deadlock as Deadlock
    from kvactors.testing.loop import Livelock as Livelock
    from kvactors.testing.loop import SimLoop as SimLoop
    from kvactors.testing.loop import loop_factory as loop_factory
    from kvactors.testing.loop import simulate as simulate
    from kvactors.testing.plan import FaultPlan as FaultPlan
    from kvactors.testing.plan import SimFaults as SimFaults
    from kvactors.testing.sim import SMALL as SMALL
    from kvactors.testing.sim import Sim as Sim
    from kvactors.testing.sim import Unclean as Unclean
    from kvactors.testing.sim import small_config as small_config
    from kvactors.testing.sink_contract import SinkContract as SinkContract
    from kvactors.testing.store_contract import StoreContract as StoreContract
    from kvactors.testing.trace import Trace as Trace
    from kvactors.testing.trace import minimal as minimal
    from kvactors.testing.trace import render as render

HOMES = {
    "faults": ("Fault",),
    "layout_contract": ("LayoutContract",),
    "loop": ("Deadlock", "Livelock", "SimLoop", "loop_factory", "simulate"),
    "plan": ("FaultPlan", "SimFaults"),
    "sim": ("SMALL", "Sim", "Unclean", "small_config"),
    "sink_contract": ("SinkContract",),
    "store_contract": ("StoreContract",),
    "trace": ("Trace", "minimal", "render"),
}
"""Public names by module, imported at their first use: parts of the package import this package."""

__all__ = [name for names in HOMES.values() for name in names]


def asyncio_marks() -> list[Any]:
    """pytest-asyncio's mark where it is installed, so that its strict mode, the default, runs the
    asynchronous tests of a suite."""
    if find_spec("pytest_asyncio") is None:
        return []
    import pytest

    return [pytest.mark.asyncio]


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            return getattr(import_module(f"kvactors.testing.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """`pytest -p kvactors.testing`: the plugin under the name of its entry point, so that it is
    registered once, also where kvactors is installed."""
    from kvactors.testing import plugin

    if not pluginmanager.is_registered(plugin) and not pluginmanager.is_blocked("kvactors"):
        pluginmanager.register(plugin, "kvactors")
