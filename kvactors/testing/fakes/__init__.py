"""Parts for simulations, around no hardware at all: copies, stores and sinks that take virtual
time and fail on command."""

from kvactors.testing.fakes.copies import SimDevice, SimExecutor
from kvactors.testing.fakes.sink import SimSink
from kvactors.testing.fakes.store import SimBackend, SimPool
from kvactors.testing.gate import Gate, Latency, instant, latency

__all__ = [
    "Gate",
    "Latency",
    "SimBackend",
    "SimDevice",
    "SimExecutor",
    "SimPool",
    "SimSink",
    "instant",
    "latency",
]
