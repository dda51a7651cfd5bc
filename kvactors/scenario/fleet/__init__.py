"""Scenario of a fleet: nodes in separate processes that share one Mooncake pool."""
