"""An engine as oracle: it computes what every block must hold from the request alone, and checks
each hit byte for byte.

Written against the documented public API. Nothing from `kvactors.testing` or `tests.simulation`
takes part in a verdict.
"""
