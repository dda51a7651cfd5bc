"""Tests inside real engines: the whole engine on a CPU, with a tiny random model."""
