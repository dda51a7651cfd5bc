"""`python -m tests.simulation`."""

import sys

from cyclopts import run

from tests.simulation.command import run_simulate

if __name__ == "__main__":
    sys.exit(run(run_simulate))
