"""Where flush tasks go."""
