"""Statistics, metrics and logs."""
