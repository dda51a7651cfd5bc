"""The adapters' specs with a worker whose copies begin late, as those of a busy GPU do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cpu_tiering import CpuTieringSpec
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvactors.integrations.vllm import KVActorsOffloadingSpec


class SlowWorker(OffloadingWorker):
    """A worker that holds each job back for some polls, unless vLLM waits for it.

    Until a job has begun, its device blocks and its slots hold what they held before. So a slot or
    a block that is used again too early gives other tokens.

    Args:
        worker: copies.
    """

    def __init__(self, worker: OffloadingWorker) -> None:
        self._worker = worker
        self._held: dict[int, tuple[int, Callable[[], bool]]] = {}

    def _hold(self, job_id: int, submit: Callable[[], bool]) -> bool:
        self._held[job_id] = (1 + job_id * 5 % 7, submit)
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        submit = self._worker.submit_store
        return self._hold(job_id, lambda: submit(job_id, src_spec, dst_spec))

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        submit = self._worker.submit_load
        return self._hold(job_id, lambda: submit(job_id, src_spec, dst_spec))

    def _begin(self, job_id: int) -> None:
        _, submit = self._held.pop(job_id)
        assert submit()

    def get_finished(self) -> list[TransferResult]:
        for job_id, (polls, submit) in list(self._held.items()):
            if polls == 0:
                self._begin(job_id)
            else:
                self._held[job_id] = (polls - 1, submit)
        return list(self._worker.get_finished())

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._held.keys():
            self._begin(job_id)
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._held.clear()
        self._worker.shutdown()


class SlowOffloadingSpec(KVActorsOffloadingSpec):
    """`KVActorsOffloadingSpec` with slow copies."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return SlowWorker(super().get_worker(kv_caches))


class SlowTieringSpec(CpuTieringSpec):
    """`CpuTieringSpec` with slow copies."""

    def get_worker(self, kv_caches: Any) -> Any:
        return SlowWorker(super().get_worker(kv_caches))
