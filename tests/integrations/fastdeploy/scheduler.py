"""A model of FastDeploy's V1 scheduler, of its worker and of its finish thread.

It is our own, from the calls that FastDeploy's scheduler makes on its cache manager and their order
(mixed role). One lock stands for the scheduler's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.integrations.fastdeploy.config import Request
from tests.integrations.fastdeploy.oracle import ModelMemory, seeds_of


def seed_of_garbage(number: int) -> int:
    """The bytes of a token that no request has."""
    return 2 * number + 2


class Scheduler:
    """Admits, computes, preempts and ends requests over one manager.

    Args:
        manager: the manager under test.
        memory: the cache tensors.
        config: FastDeploy's config.
        chunk: tokens of a prefill at most in a step.
        next_token: the model's choice for a request.
        max_running: requests that decode at once, at most.
        drafts: tokens that a draft model proposes for each decoded one (MTP).
        accepted: how many of them the model accepts for a request.
        reserve: blocks that stay free for the output of each running request when one is admitted
            (FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL).

    Attributes:
        looks_ahead: whether the blocks of a whole prompt must be free before it is matched.
        wrong: (request, tokens) whose cached bytes were not the model's.
        hits: cached tokens of each admission.
    """

    looks_ahead = True

    def __init__(
        self,
        manager: Any,
        memory: ModelMemory,
        config: Any,
        *,
        chunk: int = 64,
        next_token: Callable[[Request], int] = lambda request: len(request.tokens) % 7,
        max_running: int = 4,
        drafts: int = 0,
        accepted: Callable[[Request], int] = lambda request: 0,
        reserve: float = 0.0,
    ) -> None:
        self.manager, self.memory, self.config = manager, memory, config
        self.block_size = config.cache_config.block_size
        self.chunk, self.next_token, self.max_running = chunk, next_token, max_running
        self.drafts, self.accepted, self.reserve = drafts, accepted, reserve
        self.lock = threading.Lock()  # noqa: TID251 - stands for the scheduler's
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefilling: Request | None = None
        self.limits: dict[str, int] = {}
        self.wrong: list[tuple[str, list[int]]] = []
        self.hits: list[tuple[str, int, dict[str, Any]]] = []
        self.preemptions = 0
        self.finished: list[str] = []
        self.failures: list[BaseException] = []
        self.finisher: Callable[[Request], None] = self.finish_now

    def add(self, request: Request, max_tokens: int) -> None:
        with self.lock:
            self.limits[request.request_id] = max_tokens
            self.waiting.append(request)

    # -- a step: scheduling, and the worker's computation

    def step(self) -> bool:
        """One step. Returns whether something was scheduled."""
        with self.lock:
            work = self._schedule()
        return self._work(work)

    def _work(self, work: list[tuple[Request, int, int]]) -> bool:
        """The workers compute tokens of requests."""
        for request, start, stop in work:
            self._compute(request, start, stop)
        for request, _, stop in work:
            if stop >= request.need_prefill_tokens and request in self.running:
                self._sample(request)
        return bool(work)

    def _schedule(self) -> list[tuple[Request, int, int]]:
        work = []
        if self.prefilling is not None:
            chunk = self._chunk(self.prefilling)
            if chunk is not None:
                work.append(chunk)
        while self.waiting and self.prefilling is None and len(self.running) < self.max_running:
            chunk = self._admit(self.waiting[0])
            if chunk is None:
                break
            work.append(chunk)
        return work or self._decode()

    def _admit(self, request: Request) -> tuple[Request, int, int] | None:
        manager, size = self.manager, self.block_size
        request.need_prefill_tokens = len(request.tokens)
        if self.looks_ahead and (
            manager.num_cpu_blocks > 0 or self.config.cache_config.kvcache_storage_backend
        ):
            needed = (request.need_prefill_tokens + size - 1) // size
            if not manager.can_allocate_gpu_blocks(needed):
                return None
        if not self._match(request):
            self._free(request)
            return None
        stop = min(request.need_prefill_tokens, request.num_computed_tokens + self.chunk)
        blocks = -(-stop // size) - len(request.block_tables)
        threshold = max(0, blocks) + len(self.running) * self.reserve + bool(self.drafts)
        if not manager.can_allocate_gpu_blocks(min(threshold, manager.num_gpu_blocks)):
            self._free(request)
            return None
        self._allocate(request, blocks)
        self.waiting.popleft()
        return self._scheduled(request, stop)

    def _match(self, request: Request) -> bool:
        size = self.block_size
        try:
            blocks, tokens, metrics = self.manager.request_match_blocks(request, size)
        except Exception as error:
            self.failures.append(error)
            return False
        assert self.manager.get_required_block_num(tokens, size) == len(blocks)
        request.block_tables = blocks
        request.num_computed_tokens = tokens
        if tokens == request.need_prefill_tokens:
            request.num_computed_tokens -= size
        self.hits.append((request.request_id, tokens, metrics))
        return True

    def _chunk(self, request: Request) -> tuple[Request, int, int] | None:
        stop = min(request.need_prefill_tokens, request.num_computed_tokens + self.chunk)
        blocks = -(-stop // self.block_size) - len(request.block_tables)
        if not self.manager.can_allocate_gpu_blocks(blocks):
            if not self.running:  # it holds all that there is
                self._preempt(request)
            return None
        self._allocate(request, blocks)
        return self._scheduled(request, stop)

    def _allocate(self, request: Request, blocks: int) -> None:
        request.block_tables.extend(self.manager.allocate_gpu_blocks(blocks, request.request_id))

    def _index(self, request: Request, stop: int) -> None:
        self.manager.update_cache_blocks(request, self.block_size, stop)

    def _scheduled(self, request: Request, stop: int) -> tuple[Request, int, int]:
        start, request.num_computed_tokens = request.num_computed_tokens, stop
        self._index(request, stop)
        if stop < request.need_prefill_tokens:
            self.prefilling = request
        else:
            self.prefilling = None
            self.running.append(request)
        return request, start, stop

    def _decode(self) -> list[tuple[Request, int, int]]:
        work = []
        for request in list(self.running):
            if request not in self.running:
                continue
            total = len(request.tokens)
            start = total - 1
            blocks = -(-(total + self.drafts) // self.block_size)
            needs = max(0, blocks - len(request.block_tables))
            if needs and not self.manager.can_allocate_gpu_blocks(needs):
                self._evict(len(self.running))
                while not self.manager.can_allocate_gpu_blocks(needs):
                    others = [one for one in self.running if one is not request]
                    victim = others[-1] if others else request
                    work = [one for one in work if one[0] is not victim]
                    self._preempt(victim)
                    if victim is request:
                        break
                if request not in self.running:
                    continue
            self._allocate(request, needs)
            request.num_computed_tokens = total
            work.append((request, start, total))
        return work

    def _evict(self, count: int) -> None:
        self.manager.free_block_ids(count)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        if request in self.running:
            self.running.remove(request)
        if request is self.prefilling:
            self.prefilling = None
        self._free(request)
        request.num_computed_tokens = request.num_cached_blocks = 0
        self.waiting.append(request)

    # -- the worker

    def _compute(self, request: Request, start: int, stop: int) -> None:
        seeds = seeds_of(request)
        bad = self.memory.wrong(seeds, request.block_tables, start)
        if bad:
            self.wrong.append((request.request_id, bad))
        self.memory.compute(seeds, request.block_tables, start, stop)

    def _sample(self, request: Request) -> None:
        """A token, after those of the drafts that the model accepts. The places of the refused ones
        have bytes of other tokens."""
        left = self.limits[request.request_id] - len(request.output_token_ids)
        start = len(request.tokens)
        decoded = len(request.block_tables) * self.block_size >= start + self.drafts
        accepted = min(self.accepted(request), self.drafts, left - 1) if decoded else 0
        for _ in range(accepted + 1):
            request.output_token_ids.append(self.next_token(request))
        if decoded and self.drafts:
            seeds = seeds_of(request)[: start + accepted]
            garbage = [*seeds, *(seed_of_garbage(i) for i in range(self.drafts - accepted))]
            self.memory.compute(garbage, request.block_tables, start, start + self.drafts)
        if len(request.output_token_ids) >= self.limits[request.request_id]:
            self.end(request)

    # -- ends

    def end(self, request: Request, *, output: bool = True) -> None:
        """A request has its last token, or is aborted."""
        with self.lock:
            if output and self.config.cache_config.enable_output_caching:
                self.manager.cache_output_blocks(request, self.block_size)
            if request in self.running:
                self.running.remove(request)
            if request is self.prefilling:
                self.prefilling = None
        self.finisher(request)

    def abort(self, request: Request) -> None:
        """A client has gone, between two steps."""
        with self.lock:
            if request in self.waiting:
                self.waiting.remove(request)
                return
        if request in self.running or request is self.prefilling:
            self.end(request, output=False)

    def finish_now(self, request: Request) -> None:
        """The finish thread: the write is made without the lock."""
        self.manager.write_cache_to_storage(request)
        with self.lock:
            self._free(request)
        self.finished.append(request.request_id)

    def _free(self, request: Request) -> None:
        self.manager.release_block_ids(request)
        self.manager.recycle_gpu_blocks(
            request.block_tables[request.num_cached_blocks :], request.request_id
        )
        request.block_tables = []

    # -- whole runs

    def run(self, steps: int = 10_000) -> None:
        """Step until no request is left."""
        for _ in range(steps):
            if not (self.waiting or self.running or self.prefilling):
                return
            if not self.step():
                time.sleep(1e-4)  # a thread that ends a request gets the lock
        raise AssertionError(f"requests left: {self.left()}")

    def left(self) -> list[str]:
        some: Iterable[Request] = [*self.waiting, *self.running]
        return [request.request_id for request in some]


class V1Scheduler(Scheduler):
    """The scheduler in v1 mode, and the workers, each with its `CacheController`. Steps are a batch
    whose copies every worker makes before it computes. Prefetches reach the workers on another way:
    before the batch of their step, or after it.

    Attributes:
        batch_log: blocks copied so far.
        chance: whether something happens: a prefetch comes early, the engine gives one up.
        patience: seconds that the answers of workers are waited for.
    """

    looks_ahead = False

    def __init__(
        self,
        manager: Any,
        memory: ModelMemory,
        config: Any,
        workers: Sequence[Any],
        chance: Callable[[float], bool] = lambda _: False,
        patience: float = 20.0,
        **settings: Any,
    ) -> None:
        super().__init__(manager, memory, config, **settings)
        self.workers = workers
        self.chance, self.patience = chance, patience
        self.batch_log = {"evict": 0, "load": 0}
        self.reads: list[tuple[Any, list[Any]]] = []

    def add(self, request: Request, max_tokens: int) -> None:
        """A thread prepares the request, before the scheduler gets to it."""
        super().add(request, max_tokens)
        if self.manager.prefetch_storage(request) and not self.chance(0.3):
            self._prefetch(self.manager.drain_pending_prefetches())
            self.end_reads()

    def _prefetch(self, some: Sequence[Any]) -> None:
        for one in some:
            tasks = [worker.prefetch_from_storage(one.metadata) for worker in self.workers]
            self.reads.append((one, tasks))

    def end_reads(self) -> None:
        """What the workers answer reaches the scheduler."""
        reads, self.reads = self.reads, []
        for one, tasks in reads:
            for task in tasks:
                task.wait(self.patience)
            if all(task.is_completed for task in tasks) or self.chance(0.02):
                good = all(task.result == one.host_block_ids for task in tasks)
                end = self.manager.update_storage_blocks_to_host
                (end if good else self.manager.abort_prefetch_blocks)(one.host_block_ids)
            else:
                self.reads.append((one, tasks))

    def step(self) -> bool:
        self.batch: dict[str, list[Any]] = {"evict": [], "load": []}
        self.end_reads()
        with self.lock:
            work = self._schedule()
            if work or any(self.batch.values()):
                backup = self.manager.issue_pending_backup_to_batch_request()
                self.batch["evict"] += [backup] if backup else []
            self.manager.check_and_add_pending_backup()
            prefetches = self.manager.drain_pending_prefetches()
        late = self.chance(0.5)
        self._prefetch([] if late else prefetches)
        for name, some in self.batch.items():
            self.batch_log[name] += sum(len(one.src_block_ids) for one in some)
        evict, load = (merged(self.batch[name]) for name in ("evict", "load"))
        for worker in self.workers:
            counter = worker.submit_swap_tasks(evict, load)
            for layer in range(counter.get_num_layers() if counter else 0):
                assert counter.wait_for_layer(layer)
        self._prefetch(prefetches if late else [])
        return self._work(work)

    def _match(self, request: Request) -> bool:
        size, before = self.block_size, self.manager.metrics.storage_tokens
        try:
            self.manager.match_prefix(request, True)
        except Exception as error:
            self.failures.append(error)
            return False
        found = request.match_result
        request.block_tables = found.device_block_ids
        tokens = request.num_computed_tokens = found.total_matched_blocks * size
        if tokens == request.need_prefill_tokens:
            request.num_computed_tokens -= size
        metrics = {
            "gpu_match_token_num": found.matched_device_nums * size,
            "cpu_match_token_num": found.matched_host_nums * size,
            "storage_match_token_num": self.manager.metrics.storage_tokens - before,
        }
        self.hits.append((request.request_id, tokens, metrics))
        return True

    def _allocate(self, request: Request, blocks: int) -> None:
        if blocks > 0:
            found = self.manager.allocate_gpu_blocks(request, blocks)
            assert len(found) == blocks
            request.block_tables.extend(found)
        for name, metadata in (
            ("evict", request.cache_evict_metadata),
            ("load", request.cache_swap_metadata),
        ):
            self.batch[name] += metadata
            metadata.clear()

    def _index(self, request: Request, stop: int) -> None:
        request.prefill_end_index = stop

    def _evict(self, count: int) -> None:
        """v1 evicts when it allocates."""

    def _free(self, request: Request) -> None:
        self.manager.request_finish(request)
        request.block_tables = []

    def end(self, request: Request, *, output: bool = True) -> None:
        with self.lock:
            if request in self.running:
                self.running.remove(request)
            if request is self.prefilling:
                self.prefilling = None
        self.finisher(request)


def merged(some: Sequence[Any]) -> Any:
    """The copies of a batch, as `BatchRequest` merges them."""
    if not some:
        return None
    return SimpleNamespace(
        src_block_ids=[block for one in some for block in one.src_block_ids],
        dst_block_ids=[block for one in some for block in one.dst_block_ids],
        hash_values=[name for one in some for name in one.hash_values],
        success=False,
        error_message=None,
    )
