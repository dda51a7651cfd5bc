"""The earlier name of `kvactors.types`."""

from kvactors.types import *  # noqa: F403
