"""Adapter of AttentionStore's SDK: import, opening, readiness, calls. It is proprietary. This
module is written against the calls that FastDeploy's adapter makes
(fastdeploy/cache_manager/transfer_factory/mooncake_store/attention_store.py).

A process has one SDK object for each shard that it serves: the sink, the storage back end and every
cache that is opened with the same names share it. The SDK documents no call that closes one, so it
is kept until the process ends.
"""

from __future__ import annotations

import asyncio
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partialmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import anyio

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.errors import DeadlineExceeded, SdkError
from kvactors.identity import StoreIdentity
from kvactors.layout.base import Layout
from kvactors.settings import CacheConfig, Config, StorageConfig
from kvactors.settings.sinks import MODEL_VERSION, NAMESPACE, POD_NAME, AttentionStoreConfig
from kvactors.threads import Workers

if TYPE_CHECKING:
    from kvactors.device.base import DeviceBlocks

# -- arguments: the settings, and values derived from scope, layout, device and ranks


class Shard(NamedTuple):
    """One tensor-parallel rank's part of the service: a process has one SDK object for it."""

    package: str
    namespace: str
    pod: str
    version: str
    shard_id: int

    @property
    def names(self) -> str:
        """The names that all shards of one cache have in common."""
        return f"{self.namespace}/{self.pod}/{self.version}"


class SdkSettings(NamedTuple):
    """Complete settings of one shard."""

    shard: Shard  # its pod includes the suffix
    shard_num: int
    layers: int
    block_size: int
    piece_bytes: int
    device_id: int
    cuda: bool
    latent: bool  # the layout has keys without values (MLA)
    store: AttentionStoreConfig  # the settings that need no completion


def complete(
    store: AttentionStoreConfig,
    layout: Layout,
    *,
    model: str = "",
    version_suffix: str = "",
    shard: tuple[int, int] = (0, 1),
    gpu: int | None = None,
) -> SdkSettings:
    """Fill the values that `[attention_store]` leaves unset.

    Args:
        model: passed as the namespace where neither namespace nor model_version is set.
        version_suffix: appended to the version.
        gpu: the number of the GPU that has the device memory, None for host memory.
    """
    named = store.namespace or store.model_version
    namespace = store.namespace or (NAMESPACE if named or not model else model)
    pod = store.pod_name or POD_NAME
    if store.role_suffix is not False:
        pod = f"{pod}_{store.splitwise_role}_{store.dp_id}"
    version = (store.model_version or MODEL_VERSION) + version_suffix
    rank = shard[0] if store.shard_id is None else store.shard_id
    return SdkSettings(
        Shard(store.sdk, namespace, pod, version, rank),
        shard_num=shard[1] if store.shard_num is None else store.shard_num,
        layers=store.layer_num or len({piece.layer for piece in layout.pieces}),
        block_size=layout.block_size,
        piece_bytes=store.bytes_per_shard_layer_per_block or layout.pieces[0].nbytes,
        device_id=(gpu or 0) if store.device_id is None else store.device_id,
        cuda=(gpu is not None) if store.platform is None else store.platform == "cuda",
        latent={piece.role for piece in layout.pieces} == {"key"},
        store=store,
    )


def sdk_settings(
    config: Config,
    layout: Layout,
    device: DeviceBlocks | None = None,
    shard: tuple[int, int] | None = None,
) -> SdkSettings:
    """The SDK's settings for this cache. Its names stand for the scope that the cache is
    opened with.

    A `cache.namespace` other than the default is appended to the version, so that one version of
    the weights never reads blocks that another version wrote.

    Args:
        shard: rank and number of ranks of the calling process. If None, the leader's rank 0 of
            `ranks.count` or, without ranks, of `layout.tensor_parallel`.
    """
    namespace = config.cache.namespace
    ranks = config.ranks.count if config.ranks.count > 1 else config.layout.tensor_parallel
    return complete(
        config.attention_store,
        layout,
        model=config.cache.model,
        version_suffix="" if namespace == CacheConfig().namespace else f";namespace={namespace}",
        shard=shard or (0, ranks),
        gpu=gpu_of(config, device),
    )


def store_identity(
    config: Config, storage: StorageConfig, layout: Layout, rank: int, ranks: int
) -> StoreIdentity:
    """The identity of a rank's store. With AttentionStore its namespace is the names of the shards,
    which all ranks must have in common."""
    direct = storage.backend == "attention_store"
    namespace = sdk_settings(config, layout).shard.names if direct else storage.namespace
    return StoreIdentity(config.cache.model, namespace, layout.fingerprint, rank, ranks)


def gpu_of(config: Config, device: DeviceBlocks | None) -> int | None:
    """The number of the GPU that the device memory is on, None if it is host memory.

    The device reports it. A leader has no device memory: it goes by `[device]`, or by the Paddle
    that this process has imported.
    """
    if device is not None and device.kind != "ranks":
        return int(getattr(device, "ordinal", 0)) if device.kind == "cuda" else None
    settings = config.device
    if settings.kind == "cuda":
        return settings.ordinal
    if settings.kind == "paddle":
        kind, _, number = settings.place.partition(":")
        return int(number or 0) if kind == "gpu" else None
    paddle = sys.modules.get("paddle") if config.ranks.count > 1 else None
    return 0 if paddle is not None and paddle.is_compiled_with_cuda() else None


T = TypeVar("T")

# -- the SDK

NOT_READY = "cuda memory not ready"
"""The one error message of a passing condition: the call is tried again."""

MARGIN = 5.0
"""Seconds that an open may take beyond `ready_timeout`: its error comes first."""

CUDA_OPTIONS: dict[str, dict[str, Any]] = {
    "read": {"remote_addrs": None},
    "write": {"h2h_copy": False, "params": None},
}
"""Keyword arguments of the calls on CUDA."""

Use = Literal["index", "storage"]
"""The use of a handle. Calls of one use never overlap. Calls of different uses may overlap, as in
FastDeploy, which calls one object from two threads."""


class SdkNames(NamedTuple):
    """The names taken from the SDK's modules."""

    sdk: Any
    tokens: Any
    hbm: Any  # the medium, only for the index
    attention_type: Any  # only on CUDA


def import_sdk(package: str, *, index: bool, cuda: bool) -> SdkNames:
    """Import the names of the SDK that the use needs."""
    try:
        sdk = import_module(f"{package}.sdk")
        hbm = import_module(f"{package}.api.common.common_pb2").MEDIA_HBM if index else None
        kinds = import_module(f"{package}.client.client").AttentionType if cuda else None
        return SdkNames(sdk.AttentionStoreSDK, sdk.Tokens, hbm, kinds)
    except (ImportError, AttributeError) as cause:
        raise SdkError(
            f"AttentionStore needs the package {package!r}, which cannot be imported ({cause}). It "
            "is proprietary and comes with the "
            "AttentionStore service, not from a public index"
        ) from cause


def count_of(value: Any, most: int, what: str) -> int:
    """Check a number of blocks that the SDK returned."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if isinstance(value, bool) or not 0 <= count <= most:
        raise SdkError(f"AttentionStore: {what} gave {value!r} for {most} blocks")
    return count


def guarded(call: Callable[[], T]) -> Callable[[], T]:
    """Wrap a call so that any error in it, BaseException included, becomes an SdkError. No error of
    the SDK may end a thread or a task."""

    def run() -> T:
        try:
            return call()
        except BaseException as error:
            raise SdkError(
                f"AttentionStore: {error if isinstance(error, Exception) else repr(error)}"
            ) from error

    return run


def arguments(settings: SdkSettings, names: SdkNames) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The constructor's positional and keyword arguments."""
    one = settings.shard
    shard = (
        one.namespace,
        one.pod,
        one.version,
        one.shard_id,
        settings.shard_num,
        settings.layers,
        settings.block_size,
        settings.piece_bytes,
    )
    if not settings.cuda:
        return (*shard, settings.device_id, settings.store.dp_id), {}
    kind = getattr(names.attention_type, "MLA" if settings.latent else "MHA", None)
    if kind is None:
        raise SdkError(
            f"AttentionStore: the SDK's AttentionType has no {'MLA' if settings.latent else 'MHA'}"
        )
    keywords = {"attention_type": kind, "enable_as_kv_rw": True, "gpu_count": 0}
    return (*shard, settings.piece_bytes, settings.device_id, settings.store.dp_id), keywords


class Shared:
    """The state that all handles of one shard share."""

    def __init__(self, name: str) -> None:
        self.object: Any = None
        self.arguments: Any = None
        self.threads: dict[str, Workers] = {}
        self.handles: set[Sdk] = set()
        self._name = name

    def thread(self, use: Use | Literal["open"]) -> Workers:
        return self.threads.setdefault(use, Workers(1, f"kvactors-attention-store-{use}"))

    def make(self, wanted: Any, construct: Callable[[], Any]) -> None:
        """Make the object unless it exists. In the thread "open", so that one handle makes it."""
        if self.object is None:
            self.object, self.arguments = construct(), wanted
        if self.arguments != wanted:
            raise SdkError(
                f"this process has opened {self._name} with {self.arguments}, so it cannot be "
                f"opened with {wanted}: a process has one SDK object for "
                "each shard, and names must differ between models, layouts and devices"
            )


SHARED: dict[Shard, Shared] = {}
"""The shared state of this process, by shard."""


class Sdk:
    """A handle for one use. The SDK's calls block, so they run in a thread, in order, never two of
    one use at once. A cancelled call that has begun continues there, and the next one waits for
    it."""

    def __init__(self, settings: SdkSettings, use: Use) -> None:
        self.settings = settings
        self.use: Use = use
        self.block_size = settings.block_size
        self.names = import_sdk(settings.shard.package, index=use == "index", cuda=settings.cuda)
        self._arguments = arguments(settings, self.names)
        self.layers = list(range(settings.layers))
        one = settings.shard
        self.shared = SHARED.setdefault(one, Shared(f"shard {one.shard_id} of {one.names}"))
        self.thread = self.shared.thread(use)

    @property
    def connection(self) -> Any:
        """The SDK's object, None before `open`."""
        return self.shared.object

    async def open(self) -> None:
        """Connect, and wait until the service is ready."""
        limit = self.settings.store.ready_timeout_s
        self.shared.handles.add(self)
        try:
            with anyio.fail_after(limit):
                await self._run(
                    self.shared.thread("open"),
                    lambda: self.shared.make(self._arguments, self._construct),
                )
                while not await self._ready():  # noqa: ASYNC110  (the service announces nothing)
                    await anyio.sleep(self.settings.store.ready_interval_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"AttentionStore was not ready in {limit} s") from error

    def _construct(self) -> Any:
        positional, keywords = self._arguments
        return self.names.sdk(*positional, **keywords)

    async def _ready(self) -> bool:
        """Whether the service answers a look-up of made-up tokens."""
        tokens = self.names.tokens(list(range(self.block_size + 1)), self.block_size)
        try:
            await self.run(
                lambda: self.connection.match(tokens, 0, self.settings.store.ready_interval_s)
            )
        except SdkError as error:
            if NOT_READY in str(error):
                return False
            raise
        return True

    async def run(self, call: Callable[[], Any]) -> Any:
        return await self._run(self.thread, call)

    @staticmethod
    async def _run(thread: Workers, call: Callable[[], Any]) -> Any:
        future = thread.submit(guarded(call))
        result = asyncio.wrap_future(future)
        result.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # retrieve the error even if the caller was cancelled
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            future.cancel()  # if it has not begun, it never will
            raise

    async def flush(self, tokens: Any, start: int, *, resident: bool) -> None:
        """Blocks from `start` to the end of a path (little-endian uint32 tokens in an array) are on
        this node, or are not."""
        names = self.names
        media = (None, names.hbm) if resident else (names.hbm, None)

        def call() -> None:
            self.connection.flush_token_index(
                self.layers, names.tokens(tokens.tolist(), self.block_size), start, *media
            )

        await self.run(call)

    async def match(self, tokens: Any, start: int, seconds: float) -> int:
        """The number of blocks, from `start` on, that can be read.

        A count beyond the path is cut to the path, since only blocks that `read` returns are used.

        Raises:
            SdkError: the SDK failed, or returned no count.
        """
        most = len(tokens) // self.block_size - start
        found = await self._moving(lambda t: self.connection.match(t, start, seconds), tokens)
        return min(most, count_of(found, 1 << 62, "match"))

    async def _move(
        self,
        what: Literal["read", "write"],
        tokens: Any,
        start: int,
        regions: tuple[list[int], list[int]],
        blocks: Sequence[int],
        seconds: float,
    ) -> int:
        """Read bytes into device blocks, or write them. Returns the number of blocks moved.

        Args:
            regions: a pointer a layer to the keys, and one to the values.

        Raises:
            SdkError: the SDK failed, or returned an impossible number.
        """
        options = CUDA_OPTIONS[what] if self.settings.cuda else {}

        def call(path: Any) -> Any:
            method = getattr(self.connection, what)
            return method(self.layers, path, start, *regions, list(blocks), seconds, **options)

        return count_of(await self._moving(call, tokens), len(blocks), what)

    read = partialmethod(_move, "read")
    write = partialmethod(_move, "write")

    async def _moving(self, call: Callable[[Any], Any], tokens: Any) -> Any:
        """Run a call that touches device memory, and wait for its end even if the caller is
        cancelled."""
        future = self.thread.submit(
            guarded(lambda: call(self.names.tokens(tokens.tolist(), self.block_size)))
        )
        return await wait_uncancelled(asyncio.wrap_future(future))

    def close(self) -> None:
        """End this handle. A thread ends with its last handle, unless a call hangs in it. In that
        case it stays for the next handle, whose calls wait for the hanging one."""
        self.shared.handles.discard(self)
        used = {one.use for one in self.shared.handles}
        for use, thread in self.shared.threads.items():
            if use not in used and not (used and use == "open") and not thread.busy:
                thread.close()
