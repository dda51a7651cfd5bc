"""Proof by simulation: whole systems on a seeded loop of virtual time, under random work and random
faults, with every byte checked.

    draw -> World (system, fakes) <- faults of the plan
                 ^
    Clients -----+----- RankModel (fills and checks blocks)   Recorder (trace, coverage, crashes)

`run_seed` runs one seed to its end and reports the violations. `run_simulate` runs many on every
core.
"""

from tests.simulation.record import SeedReport
from tests.simulation.run import run_seed

__all__ = ["SeedReport", "run_seed"]
