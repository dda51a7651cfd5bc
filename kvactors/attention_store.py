"""AttentionStore's SDK: found, opened and waited for. It is proprietary; this is written against the calls that FastDeploy's adapter makes
(fastdeploy/cache_manager/transfer_factory/mooncake_store/attention_store.py), and tested against the stand-in of `kvactors.testing`."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec

from kvactors.actor.uncancelled import to_the_end
from kvactors.config import CacheConfig, Config
from kvactors.errors import DeadlineExceeded, SdkError
from kvactors.layout.base import Layout
from kvactors.sink_config import AttentionStoreConfig
from kvactors.threads import Workers

T = TypeVar("T")

NOT_READY = "cuda memory not ready"
"""The one message that passes by itself."""


class Names(NamedTuple):
    """What the SDK's modules give."""

    sdk: Any
    tokens: Any
    error: type[Exception]
    hbm: Any
    attention_type: Any  # only on CUDA


def import_sdk(config: AttentionStoreConfig) -> Names:
    """The SDK's names. SdkError if it is not installed."""
    package = config.sdk
    try:
        sdk = import_module(f"{package}.sdk")
        error = import_module(f"{package}.utils.err")
        media = import_module(f"{package}.api.common.common_pb2")
        kinds = import_module(f"{package}.client.client").AttentionType if config.platform == "cuda" else None
        return Names(sdk.AttentionStoreSDK, sdk.Tokens, error.AttentionStoreSDKError, media.MEDIA_HBM, kinds)
    except (ImportError, AttributeError) as cause:
        raise SdkError(
            f"AttentionStore needs the package {package!r}, which cannot be imported ({cause}); it is proprietary and comes with the "
            "AttentionStore service, not from a public index"
        ) from cause


def sdk_settings(config: Config) -> AttentionStoreConfig:
    """`[attention_store]` with names that stand for the scope the cache is opened with: what the service is addressed by beside tokens.

    Where neither namespace nor model_version is set, the namespace is `cache.model`. A `cache.namespace` other than the default is
    appended to the version, so that one version of the weights never reads what another wrote.
    """
    store, default = config.attention_store, AttentionStoreConfig()
    if (store.namespace, store.model_version) == (default.namespace, default.model_version) and config.cache.model:
        store = msgspec.structs.replace(store, namespace=config.cache.model)
    if config.cache.namespace != CacheConfig().namespace:
        store = msgspec.structs.replace(store, model_version=f"{store.model_version};namespace={config.cache.namespace}")
    return store


def count_of(value: Any, most: int, what: str) -> int:
    """A number of blocks that the SDK gave. SdkError if it is none, or cannot be."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if isinstance(value, bool) or not 0 <= count <= most:
        raise SdkError(f"AttentionStore: {what} gave {value!r} for {most} blocks")
    return count


def guarded(call: Callable[[], T]) -> Callable[[], T]:
    """A call that raises SdkError for whatever it raises, also for what is no Exception: nothing of it may end a thread or a task."""

    def run() -> T:
        try:
            return call()
        except BaseException as error:
            raise SdkError(f"AttentionStore: {error if isinstance(error, Exception) else repr(error)}") from error

    return run


def arguments(config: AttentionStoreConfig, layout: Layout, names: Names) -> tuple[list[Any], dict[str, Any]]:
    """The constructor's positional and keyword arguments."""
    pod = f"{config.pod_name}_{config.splitwise_role}_{config.dp_id}" if config.role_suffix else config.pod_name
    layers = config.layer_num or len({piece.layer for piece in layout.pieces})
    nbytes = config.bytes_per_shard_layer_per_block or layout.pieces[0].nbytes
    shard = [config.namespace, pod, config.model_version, config.shard_id, config.shard_num, layers, layout.block_size]
    if config.platform != "cuda":
        return [*shard, nbytes, config.device_id, config.dp_id], {}
    keywords = {"attention_type": names.attention_type.MHA, "enable_as_kv_rw": True, "gpu_count": 0}
    return [*shard, nbytes, nbytes, config.device_id, config.dp_id], keywords


class Sdk:
    """One connection. Its calls block, so each runs in a thread of its own: in order, never two at once. A call that is given up goes on
    there, and the next one waits for it."""

    def __init__(self, config: AttentionStoreConfig, layout: Layout) -> None:
        self.config = config
        self.block_size = layout.block_size
        self.names = import_sdk(config)
        positional, self._keywords = arguments(config, layout, self.names)
        self._positional = positional
        self.layers = list(range(positional[5]))
        self.connection: Any = None
        self._thread = Workers(1, "kvactors-attention-store")

    async def open(self) -> None:
        """Connect, and wait until the other side is ready. SdkError, or DeadlineExceeded after `ready_timeout`."""
        config = self.config
        try:
            with anyio.fail_after(config.ready_timeout):
                self.connection = await self.run(lambda: self.names.sdk(*self._positional, **self._keywords))
                await self._until_ready()
        except TimeoutError as error:
            raise DeadlineExceeded(f"AttentionStore was not ready in {config.ready_timeout} s") from error

    async def _until_ready(self) -> None:
        while True:
            if await self._ready():
                return
            await anyio.sleep(self.config.ready_interval)

    async def _ready(self) -> bool:
        """Whether a look-up of a few made-up tokens is answered."""
        tokens = self.names.tokens(list(range(self.block_size + 1)), self.block_size)
        try:
            await self.run(lambda: self.connection.match(tokens, 0, self.config.ready_interval))
        except SdkError as error:
            if NOT_READY in str(error):
                return False
            raise
        return True

    async def run(self, call: Any) -> Any:
        """A call in the SDK's thread. SdkError for whatever it raises."""
        future = self._thread.submit(guarded(call))
        result = asyncio.wrap_future(future)
        result.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, should nobody wait any more
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            future.cancel()  # if it has not begun, it never will
            raise

    async def flush(self, tokens: Any, start: int, *, resident: bool) -> None:
        """Blocks from `start` to the end of a path (little-endian uint32 tokens in an array) are on this node, or are not."""
        names = self.names
        media = (None, names.hbm) if resident else (names.hbm, None)

        def call() -> None:
            self.connection.flush_token_index(self.layers, names.tokens(tokens.tolist(), self.block_size), start, *media)

        await self.run(call)

    async def match(self, tokens: Any, start: int, seconds: float) -> int:
        """How many blocks, from `start` on, can be read. SdkError for what is no count; one beyond the path counts as all of it, since only
        what `read` gives is used."""
        most = len(tokens) // self.block_size - start
        found = await self._moving(lambda t: self.connection.match(t, start, seconds), tokens)
        return min(most, count_of(found, 1 << 62, "match"))

    async def read(
        self, tokens: Any, start: int, keys: list[int], values: list[int], blocks: Sequence[int], seconds: float
    ) -> int:
        """Bytes into device blocks; how many blocks. SdkError for a number that cannot be."""
        options = {"remote_addrs": None} if self.config.platform == "cuda" else {}
        got = await self._moving(
            lambda t: self.connection.read(self.layers, t, start, keys, values, list(blocks), seconds, **options), tokens
        )
        return count_of(got, len(blocks), "read")

    async def write(
        self, tokens: Any, start: int, keys: list[int], values: list[int], blocks: Sequence[int], seconds: float
    ) -> int:
        """Bytes out of device blocks; how many blocks. SdkError for a number that cannot be."""
        options = {"h2h_copy": False, "params": None} if self.config.platform == "cuda" else {}
        put = await self._moving(
            lambda t: self.connection.write(self.layers, t, start, keys, values, list(blocks), seconds, **options), tokens
        )
        return count_of(put, len(blocks), "write")

    async def _moving(self, call: Callable[[Any], Any], tokens: Any) -> Any:
        """A call that touches device memory: waited for to its end, whatever is cancelled."""
        future = self._thread.submit(guarded(lambda: call(self.names.tokens(tokens.tolist(), self.block_size))))
        return await to_the_end(asyncio.wrap_future(future))

    def close(self) -> None:
        """No more calls; one that hangs is left behind."""
        self._thread.close()
