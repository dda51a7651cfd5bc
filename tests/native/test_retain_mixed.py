"""RETAIN never hits much less than LRU on random mixtures of tenants.

`python -m tests.native.test_retain_mixed FIRST LAST` tries more seeds than a test run can afford.
"""

from __future__ import annotations

import sys

import pytest

from tests.native.test_retain_policy import TWO, Rates, check, rates, two_tiers
from tests.support.adversaries import first
from tests.support.mixed import mixed

REQUESTS = 4000


def found_on(seed, *, requests=REQUESTS):
    """The hit rates of a device, and of a device and a host tier."""
    trace = first(lambda: mixed(seed), requests)
    for size in (300, 1000):
        yield f"{size}", rates(trace, size)
    for device, host in ((300, 600), (1000, 3000)):
        both = Rates(*(two_tiers(trace, device, host, *one) for one in TWO))
        yield f"{device} and {host}", both


# The first has caught a guard that was too eager.
@pytest.mark.parametrize("seed", [24, 3])
def test_two_tiers_on_mixtures(seed):
    trace = first(lambda: mixed(seed), 2500)
    check(Rates(*(two_tiers(trace, 300, 600, *one) for one in TWO)))


@pytest.mark.traces
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(30))
def test_mixtures(seed):
    for _, found in found_on(seed):
        check(found)


def main(start: int, stop: int) -> int:
    """Print the seeds that miss the bars. Returns how many."""
    missed = 0
    for seed in range(start, stop):
        for sizes, found in found_on(seed):
            try:
                check(found)
            except AssertionError:
                missed += 1
                print(f"seed {seed}, {sizes} blocks: {found}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) != 0)
