"""Jobs of a storage tier, and their results."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvactors.tier_cache.views import ObjectViews


class StorageResult(NamedTuple):
    """The end of a job.

    Attributes:
        job: the name that the caller gave it.
        saved: whether it was a store (True) or a load (False).
        keys: of the job.
        ok: one bool a key: stored now or before, or loaded and verified.
        removed: keys that left the store during the job, of this job or others, as far as this
            process has used them.
        nbytes: bytes of the keys that are ok.
        seconds: from the submission to the end.
    """

    job: Hashable
    saved: bool
    keys: tuple[bytes, ...]
    ok: tuple[bool, ...]
    removed: tuple[bytes, ...]
    nbytes: int
    seconds: float


class StorageJob:
    """A batch for the store.

    Attributes:
        name: the caller's.
        save: whether objects are written (True) or read (False).
        keys: the caller's keys.
        names: of the objects, 32 bytes each.
        regions: memory of each object.
        generation: clears that came before the job.
        began: time of the submission.
        deadline: keys that were not begun by then fail.
        done: set when the job has ended.
    """

    __slots__ = (
        "began",
        "deadline",
        "done",
        "generation",
        "keys",
        "name",
        "names",
        "regions",
        "save",
    )

    def __init__(
        self,
        name: Hashable,
        *,
        save: bool,
        keys: Sequence[bytes],
        names: Sequence[bytes],
        regions: Sequence[ObjectViews],
        generation: int,
        timeout: float,
    ) -> None:
        self.name = name
        self.save = save
        self.keys = tuple(keys)
        self.names = tuple(names)
        self.regions = tuple(regions)
        self.generation = generation
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.done: Future[None] = Future()
