"""Functions of Linux that other systems lack or define differently. On another system the import of
this module raises an ImportError that names the reason."""

from __future__ import annotations

import os
import sys

NEEDS = (
    "this part of kvactors needs Linux (file locks, O_DIRECT, futexes), and this system is "
    "{system}. Settings and layouts work everywhere (kvactors.config, kvactors.layout). Run the "
    "cache in a Linux container or virtual machine"
)

if sys.platform != "linux":
    raise ImportError(NEEDS.format(system=sys.platform))

import fcntl  # noqa: E402  (Windows has no such module: the error above names the reason)

register_at_fork = os.register_at_fork

__all__ = ["fcntl", "register_at_fork"]
