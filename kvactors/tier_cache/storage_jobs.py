"""Jobs of a storage tier, and their results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple

from kvactors.tier_cache.known_objects import KnownObjects
from kvactors.tier_cache.views import ObjectViews

JobKind = Literal["store", "load", "lookup"]


class StorageResult(NamedTuple):
    """The end of a job.

    Attributes:
        job: the name that the caller gave it.
        kind: whether it was a store, a load or a look-up.
        keys: of the job.
        ok: one bool a key: stored now or before, loaded and verified, or found.
        removed: keys that left the store during the job, of this job or others, as far as this
            process has used them.
        nbytes: bytes of the keys that are ok. 0 for a look-up.
        seconds: from the submission to the end.
    """

    job: Hashable
    kind: JobKind
    keys: tuple[bytes, ...]
    ok: tuple[bool, ...]
    removed: tuple[bytes, ...]
    nbytes: int
    seconds: float

    @property
    def saved(self) -> bool:
        """Whether it was a store."""
        return self.kind == "store"


class StorageJob:
    """A batch for the store.

    Attributes:
        name: the caller's.
        kind: whether objects are written, read, or looked up.
        keys: the caller's keys.
        names: of the objects, 32 bytes each.
        regions: memory of each object. Empty for a look-up.
        known: the objects known at the submission. A clear has put others in their place.
        began: time of the submission.
        deadline: keys that were not begun by then fail.
        done: receives the result when the job has ended.
    """

    __slots__ = (
        "began",
        "deadline",
        "done",
        "keys",
        "kind",
        "known",
        "name",
        "names",
        "regions",
    )

    def __init__(
        self,
        name: Hashable,
        *,
        kind: JobKind,
        keys: Sequence[bytes],
        names: Sequence[bytes],
        regions: Sequence[ObjectViews],
        known: KnownObjects,
        began: float,
        timeout: float,
    ) -> None:
        self.name = name
        self.kind = kind
        self.keys = tuple(keys)
        self.names = tuple(names)
        self.regions = tuple(regions)
        self.known = known
        self.began = began
        self.deadline = began + timeout
        self.done: Future[StorageResult] = Future()
        self.done.set_running_or_notify_cancel()  # the caller cannot cancel it
