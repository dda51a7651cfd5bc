"""Storage below vLLM's own host tier: a secondary tier that vLLM loads by module path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvactors.integrations.vllm.settings import (
    identity,
    read_tier_settings,
    storage_of_replica,
    stored_model,
)
from kvactors.tier_cache import TierConfig, open_storage

DRAIN_LIMIT_S = 60.0  # limit of `drain_jobs` beyond the time that every job has


class KVActorsTier(SecondaryTierManager):
    """kvactors' verified file store as a tier below vLLM's host tier, with `TierSettings`.

    A look-up is answered from memory. A chunk whose bytes are not those that were stored is a
    failed load, which vLLM counts as a miss. Chunks are opaque, so models with several groups of KV
    cache layers are stored too: vLLM's keys name the group."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        found, storage = read_tier_settings(settings)
        config = offloading_spec.config
        self.locality = None if found.locality is None else Locality(found.locality)
        self._rows = primary_kv_view.cast("B")
        self._store = open_storage(
            TierConfig(
                model=stored_model(
                    found.model, config.model.name, get_current_vllm_config_or_none()
                ),
                block_bytes=self.block_size_bytes,
                num_slots=1,
                identity=identity(config, copied_by="vllm"),
                storage=storage_of_replica(storage, config),
            )
        )
        wanted = found.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if wanted else None

    # -- look-up and jobs

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.HIT if self._store.contains(key) else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        self._store.submit_store(job_metadata.job_id, keys, self._views(job_metadata.chunk_ids))

    def submit_load(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        self._store.submit_load(job_metadata.job_id, keys, self._views(job_metadata.chunk_ids))

    def _views(self, chunks: Iterable[Any]) -> Sequence[memoryview]:
        """The rows of chunks. A row that does not exist is an empty view, which fails its key."""
        size = self.block_size_bytes
        return [self._rows[int(chunk) * size : (int(chunk) + 1) * size] for chunk in chunks]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for found in self._store.poll():
            kept = [key for key, ok in zip(found.keys, found.ok, strict=True) if ok]
            all_kept = len(kept) == len(found.keys)
            if found.saved:
                self._record(kept, removed=False)
            self._record(list(found.removed), removed=True)
            partial = None if all_kept or found.saved else tuple(kept)
            results.append(
                JobResult(found.job, all_kept, partial, found.seconds, found.nbytes)  # type: ignore[arg-type, unused-ignore]
            )
        return results

    def has_pending_work(self) -> bool:
        return self._store.in_flight > 0 or len(self._store.results) > 0

    def drain_jobs(self) -> None:
        """Wait until no job reads or writes the host tier's memory."""
        self._store.drain(self._store.timeout + DRAIN_LIMIT_S)

    # -- events, end

    def _record(self, keys: list[bytes], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(
                OffloadingEvent(keys, Medium.STORAGE, removed, self.locality)  # type: ignore[arg-type, unused-ignore]
            )

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return ()
        events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        self._store.close()
        self._store.poll()
        self._rows = memoryview(b"")
