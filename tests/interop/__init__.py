"""Interop tests: kvactors' KV events read by the programs that read them in production."""
