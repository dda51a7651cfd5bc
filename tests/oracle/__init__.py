"""A model as oracle: it computes what every block must hold from the request alone, and the client of
`tests.load` is checked against it byte for byte.

The model is written against the documented public API. Nothing from `tests.simulation` takes part
in a verdict.
"""
