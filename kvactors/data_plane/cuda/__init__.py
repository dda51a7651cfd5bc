"""CUDA: device memory of a GPU, and copies between it and host slots by streams."""
