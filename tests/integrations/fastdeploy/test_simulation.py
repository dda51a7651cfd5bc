"""Drawn runs of the scheduler's model with faults. See simulation.py, which runs seeds too."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integrations.fastdeploy.simulation import simulate


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_drawn_runs_have_no_wrong_bytes_and_lose_no_blocks(rng):
    simulate(rng, requests=8)
