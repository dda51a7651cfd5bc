"""Benchmarks: kvactors' figures beside a limit of the same run, and the tables of
docs/benchmarks.md."""
