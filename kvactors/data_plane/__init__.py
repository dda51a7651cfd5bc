"""The data plane: moves the bytes of blocks between device memory, host slots and storage."""
