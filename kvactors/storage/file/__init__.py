"""A store in files on a local disk."""
