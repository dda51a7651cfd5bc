"""What an actor keeps about its jobs, and what becomes of those that do not end when it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvactors.actor.message import Control

JOB_LIMIT, MEMORY_LIMIT = 5.0, 60.0
"""Seconds in which a job must end after its actor failed: any job, and one that accesses memory
which cannot be withheld from reuse."""


class Job(NamedTuple):
    """counted: whether it counts as activity. slots, keys: host slots that it accesses, and blocks
    that it is about."""

    counted: bool
    slots: Sequence[int]
    keys: bytes


class JobBroken(Control, frozen=True, eq=False):
    """The completion of a job could not be built: the actor fails."""

    error: Exception


class JobsRunOn(RuntimeError):
    """Jobs of a failed actor access memory and do not end: no actor may hand out that memory
    again."""
