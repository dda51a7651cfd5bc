"""The tables of docs/benchmarks.md, from runs of `kvactors bench` and of `service`."""
