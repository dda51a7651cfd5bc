"""`python -m kvactors.simulation`: as `kvactors simulate`."""

import sys

from cyclopts import run

from kvactors.simulation.command import run_simulate

if __name__ == "__main__":
    sys.exit(run(run_simulate))
