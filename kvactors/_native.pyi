"""The native core: block tree, hash chain, block copies. Built from `native/` (C++17, nanobind).

Nothing here is thread-safe unless its docstring states it: a tree and its paths belong to one
actor. All token ids are unsigned 32-bit. All block hashes are 32 bytes (SHA-256). All arrays are
one-dimensional.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvactors.flush_notifier.messages import FlushTask
from kvactors.types import Tokens

HASH_BYTES: Final[int]
"""Bytes in a block hash: 32."""

DEVICE: Final[int]
"""State bit: the node owns a device block whose bytes are valid."""
HOST: Final[int]
"""State bit: by its last report the host tier holds this block (a hint)."""
LOADING: Final[int]
"""State bit: a copy into the node's target device block is in flight."""
OFFLOADING: Final[int]
"""State bit: picked for eviction. Its device block is being copied away."""

def sha256_accelerated() -> bool:
    """Whether the CPU's SHA instructions are in use."""

def chain_hashes(parent: bytes, tokens: Tokens, block_size: int) -> bytes:
    """Hashes of all full blocks of `tokens` under `parent` (32 bytes), without extra keys: n x 32
    bytes."""

class BlockRows:
    """Hashes (32 bytes) and tokens of the flush notifier's blocks, by row from 1. The caller
    chooses the rows, one after the other, and may use a row again after `erase`."""

    def __init__(self, token_bytes: int) -> None: ...
    def __len__(self) -> int: ...
    def find(self, block_hash: bytes) -> int:
        """The row with a hash, 0 if there is none."""

    def put(self, row: int, block_hash: bytes, tokens: bytes) -> None:
        """ValueError for a hash that a row has, and for other sizes of hash or tokens."""

    def erase(self, row: int) -> None: ...
    def hash(self, row: int) -> bytes: ...
    def hashes_of(self, rows: list[int]) -> bytes:
        """The hashes of some rows, joined. `tokens_of` joins their tokens."""

    def tokens_of(self, rows: list[int]) -> bytes: ...

class EventEncoder:
    """KV events and batches of them as MessagePack. Immutable, and usable by several threads.

    A hash is 32 bytes, hashes are these one after another. tier: one bit. ValueError for arguments
    of other lengths, or of a tier that has no medium.
    """

    def __init__(
        self,
        array: bool,
        whole_hashes: bool,
        block_size: int,
        media: Sequence[str],
        num_nil: int,
        dp_rank: bytes,
        resident: object,
        plain: object,
    ) -> None:
        """Set the form of the events.

        Args:
            array: events are arrays with their class first, not maps.
            whole_hashes: send hashes as 32 bytes, not as the number in their last 8 bytes.
            block_size: tokens of a block.
            media: by the tier's bit, the name of its medium.
            num_nil: fields after lora_name that are nil in an event without identity.
            dp_rank: the encoded end of every batch.
            resident: the residency of tasks whose blocks are stored.
            plain: the scope of tasks whose blocks have no identity beside their tokens.
        """

    def stored(self, hashes: bytes, parent: bytes, tokens: bytes, tier: int) -> bytes:
        """A BlockStored event without adapter, salt and media. parent: empty at the start of a
        sequence. tokens: little-endian uint32."""

    def stored_with(
        self,
        hashes: bytes,
        parent: bytes,
        tokens: bytes,
        tier: int,
        lora_id: bytes,
        lora_name: bytes,
        num_fields: int,
        fields: bytes,
    ) -> bytes:
        """The same with the encoded fields of the identity. fields: `num_fields` of them, with
        their names if events are maps."""

    def removed(self, hashes: bytes, tier: int) -> bytes:
        """A BlockRemoved event. hashes: in path order. The event has them in reverse."""

    def batch(self, timestamp: float, events: list[bytes]) -> bytes:
        """A batch of encoded events."""

    def batch_of_tasks(
        self,
        timestamp: float,
        tasks: Sequence[FlushTask],
        max_blocks: int,
        event: Callable[[FlushTask], bytes],
    ) -> bytes | None:
        """A batch of tasks, each as one event. None if they have more than `max_blocks` blocks, and
        if there are none. event: encodes tasks with an identity, and those without blocks."""

class FrameSender:
    """Sends messages of three frames to a ZMQ socket that never blocks. Used by the socket's thread
    alone."""

    def __init__(self, send: int, socket: int, fail: Callable[[], object]) -> None:
        """Set the socket.

        Args:
            send: address of zmq_send in the library that has opened the socket.
            socket: address of the socket. `close` must come before the socket is closed.
            fail: raises the error of the last call of that library.
        """

    def __call__(self, topic: bytes, number: int, payload: bytes) -> None:
        """Send the topic, the number as 8 bytes (big-endian) and the payload. Raises the
        error of `fail` if that fails."""

    def close(self) -> None:
        """Every further call fails."""

class Path:
    """One request's tokens, its block hashes, the nodes it holds and its device block table.

    Block i covers tokens [i * block_size, (i + 1) * block_size). Only full blocks have hashes and
    nodes.
    """

    def __init__(self, block_size: int, root: bytes, flat: bool = False) -> None:
        """`root`: the 32-byte root hash that every chain starts from. `flat`: no chain, every
        block is a child of the root. ValueError on a bad size or length."""

    flat: bool
    block_size: int
    root: bytes
    num_tokens: int
    num_full_blocks: int
    num_plain_blocks: int
    """Leading full blocks without an extra key in their path, which tokens alone tell from others
    of this root."""
    num_hashed: int
    """Leading blocks whose hashes the path has."""
    num_held: int
    """Nodes referenced by this path: the first `num_held` blocks."""
    num_committed: int
    """Leading blocks that are in the tree and resident on the device (the path's own or a canonical
    copy)."""
    num_blocks: int
    """Entries of the block table."""

    salt: int
    """A number for the salt of the request, 0 for none."""
    forgotten: bool
    """Nothing more of the path is committed: its salt was cleared."""

    def extend(self, tokens: Tokens) -> None:
        """Append tokens. ValueError for an id below 0 or above 2**32 - 1, TypeError for
        non-integers. On an error nothing is appended."""

    def append(self, other: Path) -> None:
        """Append the tokens of another path."""

    def set_root(self, root: bytes) -> None:
        """Start the chain from another root. Hashes are computed again. ValueError once the path
        holds nodes or device blocks."""

    def set_extra(self, block: int, extra: bytes) -> None:
        """Extra identity of one block (already encoded). ValueError once that block has been hashed
        or held."""

    def extra_key(self, block: int) -> bytes:
        """Extra key of one block, also of one that is not full. Empty if it has none."""

    def extra_keys(self, start: int, stop: int) -> tuple[tuple[int, bytes], ...]:
        """(position, extra key) of those of the full blocks [start, stop) that have one, in
        order."""

    def tokens(self, start: int, stop: int) -> bytes:
        """Tokens of blocks [start, stop), little-endian uint32."""

    def hashes(self, start: int, stop: int) -> bytes:
        """Hashes of full blocks [start, stop), 32 bytes each. Missing ones are computed."""

    def parent(self, block: int) -> bytes:
        """Hash of the block above a full block, or the root hash: of a flat path always that."""

    def blocks(self, start: int = 0, stop: int = -1) -> list[int]:
        """The block table (a copy): device block ids, -1 where none is assigned. `stop` -1: to the
        end."""

    def table(self) -> memoryview:
        """A copy of the whole block table, as signed 32-bit numbers."""

    def assign(self, start: int, blocks: Sequence[int]) -> None:
        """Write private device blocks into the table from position `start`, growing it as needed.
        ValueError for a gap (`start` beyond the end), or a position whose block belongs to the
        tree."""

    def complete(self, start: int, blocks: Sequence[int]) -> tuple[int, ...]:
        """`assign`, then the whole block table."""

    def is_shared(self, position: int) -> bool:
        """Whether the block at this position belongs to the tree (or is another request's load
        target)."""

class BlockPool:
    """Free device block ids 0 .. total - 1: the lowest first, later the one returned last.

    A block may have several owners: paths that a fork has made of one, a copy in flight, and the
    tree once one of the paths has committed it. Each returns it once, and it is free with the last.
    """

    total: int
    free: int
    num_shared: int
    """Blocks with more than one owner."""

    def __init__(self, total: int) -> None: ...
    def take(self, count: int) -> list[int]:
        """`count` free blocks. RuntimeError if there are not as many."""

    def owners(self, block: int) -> int:
        """How many owners a block has, 0 for a free one."""

    def share(self, blocks: Sequence[int]) -> None:
        """These blocks get one more owner each. RuntimeError for one that is free."""

    def give(self, blocks: Sequence[int]) -> None:
        """Take blocks back from one owner each. RuntimeError for one that is free already or not of
        this pool."""

    def check(self) -> None:
        """RuntimeError if the pool is inconsistent."""

class LifeTables:
    """Statistics of the eviction policy RETAIN: how many runs of each class reached each age, and
    were requested again at it. The trees of an index share them."""

    def __init__(self, inverted: bool = False, first: int = 0) -> None:
        """`inverted`: the best run is the first victim, for tests of the guard. `first`: requests
        that are only observed, while the least recently used block is the victim."""

    requests: int

class StepTokens:
    """The tokens that a decode step appends to many paths: a copy."""

    counts: list[int]
    """Tokens of each row."""

    def __init__(self, rows: list[Tokens]) -> None:
        """Errors as of `Path.extend`."""

    def row(self, row: int) -> bytes:
        """Tokens of a row, little-endian uint32."""

    def find_beyond(self, positions: list[int], computed: list[int | None], first: int) -> int:
        """The first row from `first` on whose computed tokens are not an int, or not among those of
        the position and the row. -1 if there is none."""

    def step(
        self,
        first: int,
        paths: list[Path | None],
        trees: list[BlockTree | None],
        positions: list[int],
        computed: list[int | None],
        free: int,
        most: int,
        take: Callable[[int], list[int]],
    ) -> tuple[
        list[int],
        list[tuple[int, tuple[int, ...]]],
        list[tuple[Path, int, int, list[int]]],
        list[int],
    ]:
        """Append a row to each path, row `first` to the first path, with device blocks where a
        boundary is crossed, and `commit` the full blocks of its computed tokens.

        A path is left as it is if it is None, differs in tokens from its position, lacks
        blocks for the tokens that it has, needs more than the `free` blocks that the paths before
        it leave, or cannot commit. All paths together enter `most` blocks at most. `take` is called
        once, with the number of blocks that they need. It may return fewer: paths that lack blocks
        then are left.

        Returns the committed blocks of each path, -1 for one that was left, (row, blocks) of paths
        that got blocks, (path, start, stop, adopted) of commits, and blocks that no path got.
        """

class BlockTree:
    """Blocks tracked on this node, found by tokens, identified by hash. It has a
    least-recently-used list of evictable device blocks."""

    def __init__(
        self,
        block_size: int,
        capacity: int = 0,
        touch: bool = True,
        retain: LifeTables | None = None,
        eager_hashes: bool = False,
        retain_host: LifeTables | None = None,
    ) -> None:
        """`capacity`: nodes to size the tables for up front (they grow beyond it). `touch`: bring
        their memory in now, which takes a while, instead of on first use. `retain`: the statistics
        of the eviction policy RETAIN, without which the policy is LRU. `retain_host`: the same for
        the host tier, the same tables if both are given. `eager_hashes`: hash a block
        when it enters the tree. By default a block is hashed when a call needs its hash, with the
        blocks above it, and a report of the host tier with a hash that the tree does not find
        takes a hash of every block."""

    block_size: int
    retired: bool
    hashed: int
    """Nodes whose block hash has been made."""

    def pin(self, path: Path, max_blocks: int = -1, used: bool = True) -> tuple[int, bytes]:
        """Match the path, which must hold nothing, and reference every node met, up to
        `max_blocks`.

        Returns (device_run, states): `device_run` leading blocks are resident on the device and not
        loading (their ids are in the table, shared, and they count as committed). `states` has one
        byte of state bits for each further node on the path. A LOADING node's target block is put
        in the table as shared. Other further positions read -1 there. Nodes of the device run
        that are being offloaded are kept: their OFFLOADING mark is cleared. With `used` false they
        are not, and no node counts a hit, until `keep`. Until then the end of an offload takes
        their blocks.
        """

    def pin_resident(
        self,
        path: Path,
        root: bytes,
        max_blocks: int,
        least: int,
        blocks: int,
        free: int,
        evict: bool,
        now: float,
    ) -> int:
        """`advance`, and `pin` of a request that needs no more than that and `free` blocks at most,
        or with `evict` blocks to be evicted afterwards.

        Returns the leading blocks on the device. -1, and nothing has changed but the time, if the
        path does not start from `root` or holds something, a known block is not on the device, they
        are fewer than `least`, or more than `free` of the request's `blocks` are missing.
        """

    def keep(self, path: Path, used: bool = True) -> None:
        """Keep those of the path's committed nodes that are being offloaded. If it is `used`, each
        node that the path holds counts a hit."""

    def peek(self, path: Path, max_blocks: int = -1) -> tuple[int, bytes]:
        """Return the result of `pin` without changing anything."""

    def referenced_run(self, path: Path, max_blocks: int = -1) -> int:
        """Leading blocks of the path, at most `max_blocks`, that are resident on the device and
        referenced by a path: pinning them takes no block from `evict`. Changes nothing."""

    def trim(self, path: Path, held: int) -> list[int]:
        """Drop references beyond the first `held` nodes (not below `num_committed`), and remove
        the shared blocks of those positions (they read -1)."""

    def retreat(self, path: Path, blocks: int) -> list[int]:
        """Drop references beyond the first `blocks` nodes, committed ones included. Those
        positions read -1. Returns device blocks that are free now (of a retired tree)."""

    def truncate(self, path: Path, num_tokens: int, extra: bytes = b"") -> list[int]:
        """Drop the tokens of the path beyond the first `num_tokens`, with the references, hashes,
        extra keys and private device blocks that no remaining token needs. `extra`: the extra key
        of the block that then ends within. Returns the device blocks that are free now. ValueError
        if the path has fewer tokens, for tokens of committed blocks, and for blocks being loaded:
        nothing is changed then."""

    def drop_leading(self, path: Path, blocks: int) -> list[int]:
        """Drop the first blocks of a flat path: its others take their positions. Returns device
        blocks that are free now. ValueError for other paths, and for blocks being loaded."""

    def probe(self, path: Path, start: int, stop: int) -> bytes:
        """The state bits of full blocks [start, stop) of a flat path, 0 for unknown ones."""

    def commit(self, path: Path, upto: int) -> tuple[int, int, list[int]]:
        """Make the path's computed blocks [num_committed, upto) shareable. Returns (start, stop,
        adopted).

        A missing child is created and takes the path's device block. An existing child resident on
        the device is referenced (the path's own block stays private). An existing child not on the
        device takes the path's block, and if it had the HOST bit its position is listed in
        `adopted`. The commit stops at a LOADING child. ValueError if a position has
        no block or `upto` exceeds the full blocks.
        """

    def commit_tokens(self, path: Path, tokens: int, known: bool) -> int:
        """`commit` of the full blocks among the first `tokens` tokens. `known`: only if they are
        committed already. Returns the committed blocks. -1, and nothing has changed, if the path
        has fewer tokens or blocks, the commit would enter nothing, or the host may have them.
        ValueError as `commit`."""

    def release(self, path: Path) -> list[int]:
        """Drop all references, deepest first, and empty the table. Returns the device blocks that
        are free now: the path's private ones, and in a retired tree those of nodes without a
        reference. Unreferenced resident nodes join the LRU as most recently used, the deepest first
        (so the root side is evicted last)."""

    def fork(self, path: Path, fork: Path) -> list[int]:
        """Make the empty path `fork` a second path of the same tokens. It references the same nodes
        and has the same device blocks for its full blocks, as far as `path` has blocks for them. It
        has no block for a last one that is not full. Returns the private blocks of `path` that both
        have now: each path returns them once. ValueError if `fork` is not empty."""

    def begin_load(self, path: Path, start: int, stop: int) -> NDArray[np.uint32]:
        """Mark blocks [start, stop) as loading into the table's private blocks, creating and
        referencing missing nodes. The blocks become shared. Returns the node ids, the handle for
        `finish_load`. ValueError if one is on the device or loading already, has no block, or
        `start` is beyond the nodes held."""

    def finish_load(self, nodes: NDArray[np.uint32], good: int) -> list[int]:
        """End a load: the first `good` nodes become resident (as far as their parents are), the
        others lose their target. Returns the target blocks of those that did not become resident,
        in order. Unreferenced resident nodes join the LRU. Unreferenced empty nodes are
        removed. In a retired tree, unreferenced ones are returned too."""

    def settle(self, path: Path) -> int:
        """Advance `num_committed` over held nodes now resident with the table's block. Returns it.
        Table positions beyond it whose node neither is resident nor loading into that block become
        private again."""

    def replace(self, path: Path, position: int, block: int) -> None:
        """Put a private block (-1: none) at one position at or beyond `num_committed`, in
        place of the previous entry (no block is freed)."""

    def advance(self, now: float) -> None:
        """The time in seconds, before a match and before `touch`, for RETAIN. It never goes
        backwards: a smaller value changes nothing."""

    def touch(
        self, path: Path, output_tokens: int = -1, ends: bool = False, returns_in: float = -1.0
    ) -> None:
        """The request of the path has ended, and still references its blocks: RETAIN learns when
        they were used. `output_tokens`: of the model, -1 if that is not known. Hints of the caller:
        whether its session `ends`, and the seconds in which it `returns_in`, -1 if that is not
        known."""

    def end(self, path: Path, output_tokens: int, now: float) -> list[int] | None:
        """`advance`, `touch` and `release` of a request that has ended. Returns the blocks that are
        free. None, and nothing has changed, in a retired tree and in one with salts or hints."""

    def host_victims(self, count: int) -> bytes:
        """Hashes of up to `count` blocks that the host tier should evict next, in this order: the
        choice of RETAIN among the blocks that only the host has and that nothing uses. They are not
        returned again until they are used. Empty without `retain_host`."""

    def host_kept(self, exclusive: bool) -> int:
        """Blocks of the host tier, without those that `host_victims` has returned and in exclusive
        tiers without those that a request uses, which are leaving for the device."""

    def host_lacks(self, path: Path, start: int, stop: int) -> int:
        """Blocks [start, stop) of a path that the host tier does not have."""

    def retention(self, host: bool = False) -> dict[str, int] | None:
        """Counts of RETAIN in the device tier or in the host tier, None under LRU. The blocks of
        the host tier's are those of device and host together.

        `runs` and `ghosts` (evicted blocks) that are remembered. `requests`, and their blocks that
        were `touched`. `hits` of those, and `shadow_hits` of an exact LRU with as many blocks as
        are `resident` now. `displaced`: blocks that this LRU has and the device lacks, `limit`: as
        many as RETAIN may choose. Evicted blocks that were `chosen` by RETAIN, and those that were
        the `oldest`."""

    def evict(
        self, count: int, hashes: bool = True, salt: int = 0, incoming: int = 0, now: float = 0.0
    ) -> tuple[
        NDArray[np.uint32],
        bytes,
        bytes,
        list[int],
        bytes,
        tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]],
        list[int],
    ]:
        """Pick up to `count` resident, unreferenced nodes, the least recently used first and
        children before parents, for a request of `salt` that takes `incoming` blocks.

        With quotas and hints, blocks come first that have expired at `now`, then those of the salt
        itself if it would be above its quota, then those of any salt above its quota, then by
        priority.

        Returns (nodes, hashes, parents, blocks, states, traits, freed): `states` are the state bits
        when chosen, before OFFLOADING, `traits` salt, priority and expiry of each block in a tree
        with quotas and hints, and `freed` blocks that were cleared with their salt. Without
        `hashes` both kinds are empty, and nothing is hashed."""

    def drop(
        self, count: int, hashes: bool = True, salt: int = 0, incoming: int = 0, now: float = 0.0
    ) -> tuple[list[int], int, bytes, bytes]:
        """Take blocks from the device at once, chosen as by `evict`. Blocks that an offload
        still reads leave with its end.

        Returns (freed, evicted, hosted, lost): `freed` device blocks, of which the first `evicted`
        are victims and the others were cleared with their salt, and the hashes of the victims that
        the host tier has, and that it lacks. Without `hashes` both are empty."""

    sharing: bool
    """Whether the tree tracks salts, quotas and hints: from the first of them on."""
    pinned: int
    """Blocks that are pinned."""
    quota_evictions: int
    """Blocks that were evicted because of a quota."""

    def share(self) -> None:
        """Track salts and hints from now on. One pass over the tree."""

    def set_default_quota(self, blocks: int) -> None:
        """The most device blocks of each salt that has no named quota, negative for none."""

    def set_quota(self, salt: int, blocks: int, named: bool = True) -> None:
        """The most device blocks of a salt, negative for no limit. Without `named` the default
        applies again."""

    def owners(self) -> dict[int, tuple[int, int, int]]:
        """Device blocks, evictable ones and evictions because of the quota, by salt. Evictions are
        counted of the first 4,096 salts, and of those with a named quota."""

    def owner(self, salt: int) -> tuple[int, int, int]:
        """The entry of one salt in `owners`."""

    def hint(self, path: Path, priority: int, expiry: float = ...) -> None:
        """The request of the path has ended, with these hints for its blocks. A block is never
        evicted before those below it, so it keeps the highest priority and the latest expiry that
        one of them has."""

    def pin_blocks(self, path: Path, blocks: int, limit: int) -> NDArray[np.uint32] | None:
        """Pin the first `blocks` blocks of a path, all of them committed. None, and no change, if
        more than `limit` blocks would be pinned. The result is the handle for `unpin_blocks`."""

    def unpin_blocks(self, nodes: NDArray[np.uint32]) -> list[int]:
        """End one pin of these nodes. Returns the device blocks that are free now, of a retired
        tree or a forgotten salt."""

    def begin_forget(self, salt: int) -> bool:
        """End all matching of a salt's blocks, in a time that does not depend on their number.
        `forget_step` frees them. Returns whether there are any."""

    def forget_step(self, count: int, hashes: bool = True) -> tuple[bool, list[int], bytes]:
        """A step after `begin_forget`, over about `count` blocks. Returns whether it was the last
        one, the device blocks that are free now, and the hashes of blocks that are not on the
        device any more. Referenced blocks are returned by a later `release`, in-flight ones by
        `finish_load` and `finish_offload`."""

    def is_forgotten(self, path: Path) -> bool:
        """Whether the blocks of a path were forgotten since it was matched, or the path is marked
        so."""

    def forgotten(self, nodes: NDArray[np.uint32]) -> list[int]:
        """The indices of nodes that were forgotten."""

    def contents(self, nodes: NDArray[np.uint32]) -> tuple[bytes, bytes, list[tuple[int, bytes]]]:
        """The root hashes and the tokens of nodes in the tree, each as one buffer, and (index,
        extra key) of those that have one. `nodes`: as `evict` returns them."""

    def finish_offload(
        self, nodes: NDArray[np.uint32], on_host: bytes
    ) -> tuple[list[int], list[int]]:
        """End an eviction: `on_host[j]` non-zero if the host tier kept node j, which then gets
        the HOST bit. Nodes still marked lose their device block, once no other eviction is reading
        it. The rest, matched again or still being read, keep it. Returns (freed device blocks,
        indices j that kept theirs). Empty unreferenced nodes are removed."""

    def host_blocks_added(self, hashes: bytes) -> int:
        """Set HOST on the nodes with these hashes that are in the tree, and return their number."""

    def host_blocks_removed(self, hashes: bytes) -> int:
        """Clear HOST on the nodes with these hashes, and return how many are in the tree. Empty
        unreferenced nodes are removed."""

    def clear_host(self) -> None:
        """Clear HOST everywhere, in a time independent of the tree's size. `sweep_host` removes the
        nodes that nothing else keeps."""

    def sweep_host(self, count: int) -> bool:
        """One step of the removals after `clear_host`, over `count` nodes. True when nothing is
        left to do."""

    def mark_announced(self, path: Path, start: int, stop: int) -> int:
        """Mark held nodes [start, stop) announced. Returns the first that was not, `stop` if all
        were. A node that takes a device block again is not announced."""

    def worth_saving(self, path: Path, start: int, stop: int, min_hits: int) -> list[int]:
        """Positions in [start, stop) whose node was pinned at least `min_hits` times (creation
        counts as one)."""

    returning: int
    """Device blocks of a retired tree that `sweep` has not returned yet."""
    idle: bool
    """Whether the tree is retired, has no device block, and no path or operation holds a node."""

    def retire(self) -> int:
        """End all matching. Returns the number of unused device blocks, which `sweep` returns.
        Referenced ones are returned by later `release`, in-flight ones by `finish_load` /
        `finish_offload`. The time does not depend on the tree's size."""

    def sweep(self, count: int) -> list[int]:
        """Up to `count` unused device blocks of a retired tree, which are free now, the least
        recently used first."""

    def dismantle(self) -> bool:
        """Free a part of an idle tree's memory, a few megabytes. True when all of it is freed.
        ValueError if the tree is not idle."""

    def device_hashes(self) -> bytes:
        """Hashes of all nodes resident on the device."""

    def paths(self) -> list[tuple[bytes, bytes, bytes, bytes]]:
        """For each leaf of the tree: (root hash, tokens, hashes, state bits), from the root."""

    def statistics(self) -> dict[str, int]:
        """nodes, device, host, evictable, referenced (nodes), loading, offloading, bytes."""

    def listing(self, start: int, count: int) -> tuple[bytes, bytes, int]:
        """Keys and state bits of up to `count` nodes, from the node id `start` on, and the next
        `start` (-1 at the end)."""

    def check(self) -> None:
        """Recompute every invariant. RuntimeError names the difference."""

class TreeCheck:
    """A check of every invariant of a tree, in steps with other calls between them."""

    def __init__(self, tree: BlockTree) -> None: ...

    exact: bool
    """Whether the tree has not changed since the check began. Order, sums and counts of the whole
    are compared only then. The invariants of a single node are checked in any case."""

    def step(self, count: int) -> bool:
        """Check `count` more nodes. True when all were checked. RuntimeError names the
        difference."""

def gather(
    regions: NDArray[np.int64],
    piece_bytes: NDArray[np.int64],
    region_blocks: int,
    blocks: NDArray[np.int64],
    arena: int,
    slot_stride: int,
    num_slots: int,
    slots: NDArray[np.int64],
) -> None:
    """Device to host: for each pair j, the pieces of `blocks[j]` from every region, one after
    another, into `slots[j]`.

    `regions[r]`: address of region r, laid out [block][piece_bytes[r]]. Slot s starts at `arena + s
    * slot_stride`. Releases the GIL. Safe to call from several threads on disjoint blocks.
    ValueError on an id out of range or unequal lengths.
    """

def scatter(
    regions: NDArray[np.int64],
    piece_bytes: NDArray[np.int64],
    region_blocks: int,
    blocks: NDArray[np.int64],
    arena: int,
    slot_stride: int,
    num_slots: int,
    slots: NDArray[np.int64],
) -> None:
    """Host to device: the inverse of `gather`."""

class SlabQueue:
    """Reads and writes of the slots of a file store in native threads, many slots a job, each with
    its checksum and its table entry. Threads start with the jobs that need them.

    Args:
        read_threads, write_threads: 1 to 1024 each.
        niceness: of the threads.
    """

    def __init__(self, read_threads: int, write_threads: int, niceness: int) -> None: ...
    def bind(
        self,
        folder: int,
        table: int,
        table_path: bytes,
        table_inode: int,
        flags: int,
        size: int,
        stride: int,
        entry_bytes: int,
        slots_per_slab: int,
    ) -> None:
        """Set the files of the jobs that follow: descriptors of the folder and of the table, the
        path and inode of the table, flags to open slabs with, and the sizes of `Meta`."""

    def set_slabs(self, descriptors: list[int]) -> None:
        """Set the descriptors of the slabs. -1: the slab is opened for each call."""

    def set_arena(self, address: int, size: int, stride: int) -> None:
        """Set the memory whose slots may be moved to their ends."""

    def submit(
        self, writes: bool, direct: bool, slots: list[int], views: list[memoryview], records: bytes
    ) -> int:
        """Begin to move objects. Returns the job's number. The views are referenced until the job
        has been returned by `take_ended`.

        Args:
            writes: whether the views are written to the slots.
            direct: whether the slabs are open for direct I/O.
            slots: of the store.
            views: one for each.
            records: to read, the mark of each object (16 bytes). To write, the entry of each
                object, in which the checksums are filled in.

        Raises:
            ValueError: a slot, a view or the records do not fit.
            RuntimeError: the queue is closed, or was used before a fork.
        """

    def seal(self, direct: bool, sync: bool, slots: list[int], entries: bytes) -> int:
        """Begin to write the joined entries of slots to the table. Returns the job's number. All
        slots have the same outcome.

        Args:
            direct: whether the slabs are open for direct I/O.
            sync: whether the payloads, and then the entries, are on the device when it has ended.
            slots: of the store.
            entries: one for each.
        """

    def erase(self, slots: list[int]) -> int:
        """Begin to write zeros in place of the entries of slots. Returns the job's number."""

    def take_ended(self) -> list[tuple[int, list[int], bytes]]:
        """Number, outcomes and records of the jobs that have ended and were not returned before.
        Outcomes: 0 done, 1 corrupt, 2 the table is not at its path, 3 not begun (cancelled), or a
        negative error number."""

    def cancel(self, number: int) -> None:
        """The parts of a job that no thread has begun are not begun any more."""

    def wait_idle(self, seconds: float) -> bool:
        """Whether no job is in flight, after `seconds` at most. Releases the GIL."""

    def close(self, seconds: float) -> bool:
        """Refuse further jobs. Returns whether the threads have ended, after `seconds` at most.
        Releases the GIL."""

    def set_calls(self, read: int, write: int, inode: int, sync: int) -> None:
        """Replace the system calls of the threads by C functions at these addresses, 0 for the
        system's. For tests. Each returns its result or a negative error number."""

    @property
    def in_flight(self) -> int: ...
    @property
    def event_fd(self) -> int: ...

def addresses(views: list[memoryview]) -> list[int]:
    """Where the memory of each view begins."""

def object_names(prefix: str, keys: bytes) -> list[str]:
    """The name of each object of a pool: the prefix and its key (joined, 32 bytes each) in hex."""

def slot_pointers(address: int, stride: int, slots: Sequence[int]) -> list[list[int]]:
    """The address of each slot of an arena, as the only piece of an object."""

def make_headers(
    digest: bytes, keys: bytes, pointers: list[list[int]], size: int, checksums: bool = True
) -> None:
    """Write the headers (`header.py`) of objects of `size` bytes. Releases the GIL.

    Args:
        digest: of the store's identity.
        keys: joined, 32 bytes each.
        pointers: addresses of each object: of a payload that 96 bytes for the header follow, or of
            the payload and of the header. The caller keeps the memory.
        size: bytes of a payload.
        checksums: whether the headers have checksums of the payloads.
    """

def check_headers(
    digest: bytes, keys: bytes, pointers: list[list[int]], size: int, checksums: bool = True
) -> bytes:
    """Compare each header with its object: one `header.Fit` an object. Arguments as for
    `make_headers`. Without `checksums` payloads are not read. Releases the GIL."""

def work_in_background() -> None:
    """Let other threads run between pieces of the calling thread's copies and checksums: every 256
    KiB to 1 MiB, and less often while other programs keep the processors busy."""

def xxh3_64(data: bytes | memoryview, plain: bool = False) -> int:
    """XXH3-64 of a buffer. plain: without vector instructions."""

class CopyQueue:
    """Copies between device blocks and host slots in native threads, and the queue of the ended
    ones. Threads start with the first job that is not copied inline.

    Args:
        addresses, piece_bytes, strides: of the device's regions: block b of region r is at
            addresses[r] + b * strides[r].
        num_blocks: blocks of every region.
        memory, row_stride: address of the first row of host slots, and bytes to the next.
        slots_per_row: slots that follow one another in a row, each with the pieces of a block.
        num_slots: slots in all rows.
        threads: 1 to 64.
        inline_bytes: smaller jobs are copied by the thread that submits them.

    Raises:
        ValueError: the sizes do not fit.
    """

    def __init__(
        self,
        addresses: NDArray[np.int64],
        piece_bytes: NDArray[np.int64],
        strides: NDArray[np.int64],
        num_blocks: int,
        memory: int,
        row_stride: int,
        slots_per_row: int,
        num_slots: int,
        threads: int,
        inline_bytes: int,
    ) -> None: ...
    def submit(self, to_host: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
        """Begin to copy every pair. Returns the job's number.

        ValueError: a number is out of range, or the lengths differ. RuntimeError: the queue is
        closed, or was used before a fork."""

    def take_ended(self) -> list[tuple[int, int, float]]:
        """Number, bytes and seconds of the jobs that have ended and were not returned before."""

    def wait(self, number: int, seconds: float) -> bool:
        """Whether a job has ended, after `seconds` at most. Releases the GIL."""

    def close(self) -> None:
        """End the threads after the submitted jobs. Releases the GIL."""

    @property
    def in_flight(self) -> int: ...

def touch(address: int, nbytes: int) -> None:
    """Write one zero byte to each page, so that later use does not fault. Releases the GIL."""

def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """Plain memcpy with the GIL released (the limit that benchmarks compare with)."""

def fill_blocks(
    regions: NDArray[np.int64],
    piece_bytes: NDArray[np.int64],
    region_blocks: int,
    blocks: NDArray[np.int64],
    keys: bytes,
) -> None:
    """Write into every piece of `blocks[j]` a pattern that depends on keys[32j:32j+32], the region
    and the offset."""

def check_blocks(
    regions: NDArray[np.int64],
    piece_bytes: NDArray[np.int64],
    region_blocks: int,
    blocks: NDArray[np.int64],
    keys: bytes,
) -> list[int]:
    """Indices j whose bytes differ from the pattern of `fill_blocks`. Releases the GIL."""

class TreeWalk:
    """A walk over all blocks of a tree, parents first and each once, in steps with other calls
    between them.

    Every block that is in the tree from the beginning to the end of the walk is met. A block made
    or removed in between may be met or not.
    """

    def __init__(self, tree: BlockTree) -> None: ...
    def step(
        self, count: int
    ) -> tuple[
        bool, list[tuple[bytes, bytes, int, bytes, bytes, bytes, tuple[tuple[int, bytes], ...]]]
    ]:
        """Visit `count` more nodes. Returns whether all were visited, and consecutive blocks of
        paths: (root hash, hash of the block before them, position of the first, tokens, hashes,
        state bits, extra keys by position in the path)."""
