"""Benchmarks: ours, the limit measured beside it, and the ratio."""
