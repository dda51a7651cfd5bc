"""The tests of kvactors, and the tools that prove it: simulation, chaos, soak, oracle, interop, planted bugs."""
