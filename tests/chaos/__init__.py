"""Chaos: real faults against real processes, files and sockets under load, and the same invariants
after each.

A situation is a module of this package with a coroutine function `run`, named in `run.MODULES`. Its
findings go into a `record.Tally`.
"""
