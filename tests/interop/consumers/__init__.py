"""The consumers of KV events that the interop tests run, each as a separate process in its own
environment."""
