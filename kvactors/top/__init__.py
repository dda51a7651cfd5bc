"""`kvactors top`: the state of a running process, read from its metrics over HTTP."""
