"""One client with one weighted table of operations, for every test of random load.

`Client` makes requests and orders on a `Ground`: an open cache and what is known to be true there.
The simulation (virtual time, planned faults), the oracle and the soak (real time, threads, killed
processes) and chaos (real faults) are grounds. An operation is taught once: a method of `Batch`
and its weight in `OPERATIONS`, or of `Client` and its weight in the `orders` of a `Mix`.
"""
