"""Proof of a fleet: nodes in processes and network namespaces over one Mooncake pool, under faults.
`python -m tests.fleet`."""
