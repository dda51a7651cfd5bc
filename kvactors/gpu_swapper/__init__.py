"""GpuSwapper: copies between device memory and the host arena."""
