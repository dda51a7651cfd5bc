"""CpuEvictor: the host tier, its slots, and every movement through host memory."""
