"""The scheduler's calls about one request: match, commit, write, release."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import KVActorsError
from kvactors.integrations.fastdeploy.arguments import name_of, sequence_of, whole
from kvactors.integrations.fastdeploy.device_cache import DeviceCache
from kvactors.integrations.fastdeploy.direct_storage import CallInFlight
from kvactors.integrations.fastdeploy.engine_tiers import EngineTiers
from kvactors.integrations.fastdeploy.hit_rates import HitRates, HitTokens
from kvactors.integrations.fastdeploy.matching import Match, Matcher
from kvactors.integrations.fastdeploy.requests import RequestRecord

log = get_logger()


class RequestCalls:
    """Reads FastDeploy's requests, and keeps their records.

    Args:
        cache: the device's blocks.
        tiers: everything below them.
        rates: counts hits.
    """

    def __init__(self, cache: DeviceCache, tiers: EngineTiers, rates: HitRates) -> None:
        self._cache = cache
        self._tiers = tiers
        self._rates = rates
        self._matcher = Matcher(cache)

    def match(self, task: Any, block_size: int) -> tuple[list[int], Match]:
        """See `PrefixCacheManager.request_match_blocks`. Returns the blocks and where they were."""
        request, root = name_of(task), self._tiers.root()
        record = RequestRecord(task, self._checked_size(block_size), root)
        self._cache.release(request)
        found = self._matcher.match(request, record) if self._caches else Match()
        self._cache.requests.open(request, record)
        gpu, cpu, storage = (
            len(some) * block_size for some in (found.gpu, found.cpu, found.storage)
        )
        self._rates.matched(HitTokens(gpu, cpu, storage, record.path.num_tokens))
        task.num_cached_blocks = len(record.nodes)
        return [node.block for node in record.nodes], found

    def commit(self, task: Any, block_size: int, computed: Callable[[int], int]) -> None:
        """Index the full blocks of a request. One that a reset has forgotten is not cached.

        Args:
            task: FastDeploy's request.
            block_size: tokens of a block.
            computed: the tokens that are computed, by the number of its tokens.

        Raises:
            LookupError: the request was not matched, or was released.
            ValueError: the block table does not have the blocks, or the block size is another one.
        """
        request = name_of(task)
        self._checked_size(block_size)
        self._cache.settle()
        record = self._cache.requests.named(request)
        if record is None:
            log.warning("request of before a reset not cached", request=request)
            return
        full = computed(record.tokens_of(task)) // block_size if self._caches else 0
        # before the tokens: a refused call changes nothing
        own = self._cache.requests.uncommitted(
            record, sequence_of(task, "block_tables"), full, request
        )
        record.extend(task)
        self._cache.commit(record, own)
        task.num_cached_blocks = len(record.nodes)

    def write(self, request: str) -> None:
        """See `PrefixCacheManager.write_cache_to_storage`."""
        requests = self._cache.requests
        record = requests.begin_write(request)
        if record is None:
            return
        late: Future[int] | None = None
        try:
            record.finished = True
            self._save(request, record)
        except CallInFlight as error:
            late = error.answer  # the SDK may read the blocks before it returns
            log.error("request not written to storage", request=request, error=str(error))
        except (KVActorsError, TimeoutError) as error:
            log.error("request not written to storage", request=request, error=str(error))
        finally:
            if late is None:
                requests.end_write(record)
            else:
                late.add_done_callback(lambda _: requests.end_write(record))

    def _save(self, request: str, record: RequestRecord) -> None:
        lower, direct, nodes = self._cache.lower, self._cache.direct, list(record.nodes)
        blocks = [node.block for node in nodes]
        if lower is not None and lower.writes is not None and nodes:
            requests = self._cache.requests
            keys = [node.hash for node in nodes]
            lower.writes.write(keys, blocks, lambda: requests.holds(request, record))
        if direct is not None and nodes and not record.has_media:
            direct.save(record.path.tokens(0, len(nodes)), 0, blocks)

    @property
    def _caches(self) -> bool:
        """Whether prefix caching is on. Otherwise requests hold nothing: nothing evicts blocks."""
        return self._tiers.settings.prefix_caching

    def _checked_size(self, block_size: int) -> int:
        size, expected = whole("block_size", block_size), self._tiers.settings.block_size
        if size != expected:
            raise ValueError(f"block_size is {expected} in the config, and {size} here")
        return size
