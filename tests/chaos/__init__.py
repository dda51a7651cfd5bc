"""Chaos: real faults against real processes, files and sockets under load, and the same invariants
after each.

A situation is a module of this package with a `SITUATION`, named in `situations.MODULES`. Its
findings go into a `record.Tally`.
"""
