"""Planted bugs of settings, sizes, the command line and the package. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

RANGES = "tests/config/test_ranges.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "unknown_kinds_pass",
        "applicable.py",
        '    if ":" not in value:\n',
        "    if False:\n",
        "a misspelt back end is found when a cache is opened, not when the file is checked",
        (RANGES + "test_an_error_names_the_setting_and_what_is_allowed",),
    ),
)
