"""The consumers of KV events that the interop tests run, each as a process of its own in its own
environment."""
