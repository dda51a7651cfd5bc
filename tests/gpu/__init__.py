"""Everything that needs a GPU, in one command: see `__main__`."""
