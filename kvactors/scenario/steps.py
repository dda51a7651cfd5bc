"""The steps of a script. A verb is a call of `KVCache` or `Lease` of the same name, and its fields
are that call's parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

import msgspec
import numpy as np

from kvactors import errors
from kvactors.cache import Cleared
from kvactors.errors import KVActorsError, LeaseEnded
from kvactors.hints import Hints
from kvactors.lookup import PromptHits
from kvactors.scenario.engine import Engine, Model, ScenarioRequest
from kvactors.settings.check import BlockSize, Count, Number, Seconds, Tokens

VOCABULARY = 150_000

Outcome = Literal[
    "ok",
    "NoRoom",
    "NeverFits",
    "DeadlineExceeded",
    "Paused",
    "CacheAsleep",
    "LeasesOpen",
    "SleepUnsupported",
    "LeaseEnded",
    "NotReady",
    "TokensCommitted",
    "StoreError",
    "StoreUnsupported",
    "SinkError",
    "ValueError",
]

Results = dict[str, Any]
"""What a call has returned, by the name of the field that a step expects it in."""


def random_tokens(rng: np.random.Generator, count: int) -> Any:
    """Tokens of a made-up text, uint32."""
    return rng.integers(0, VOCABULARY, count, dtype=np.uint32)


class MediaSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A media item of a prompt.

    Attributes:
        offset: tokens before the item.
        length: tokens.
        hash: of its content.
    """

    offset: Number
    length: Count
    hash: str


def verb_of(name: str) -> str:
    """The verb of a class of steps: next_chunk for NextChunkStep."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Step")).lower()


class ScriptStep(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    tag=verb_of,
):
    """A call of the API, and its expected results. An unset argument has the call's default.

    Attributes:
        expect: ok, or the error that the call must raise.
        deadline: seconds of the call, and of the loads of an acquire.
        request: name of the request and its lease.
        child: request of the fork.
        children: requests of the forks.
        prompt: seed of the tokens. Prompts of a seed begin alike.
        tokens: number of tokens.
        media: items in the tokens.
        salt: of the prompt.
        lora: adapter.
        lora_id: number of the adapter on KV events.
        chunk_tokens: tokens after the cached ones that get blocks (chunked prefill).
        wait_for_evictions: wait for evictions in flight.
        wait_for_room: wait for blocks of other requests.
        hints: priority, ttl, pin, session_ends, returns_in.
        num_tokens: tokens to take blocks for, or (truncate) to keep.
        computed_tokens: computed tokens. Unset in a commit: all that have blocks.
        output_tokens: generated tokens, the last ones.
        namespace: of later requests.
        device: quota, in blocks or bytes ("8 MiB").
        host: quota in the host tier.
        storage: clear the store too, or quota in the store.
        erase: overwrite objects that left the store.
        sink: name of the sink.
        sinks: to wait for. Unset: all.
        at_rest: wait until the cache is idle first.
        level: 1 releases device memory, 2 host memory as well.
        cached_tokens: expected, after the loads of an acquire.
        hits: expected blocks on device, host and storage.
        blocks: expected blocks found, taken, dropped, committed or freed.
        pinned_blocks: expected, after the end of the request.
    """

    expect: Outcome = "ok"

    @property
    def verb(self) -> str:
        return str(self.__struct_config__.tag)

    async def run(self, script: Script) -> Results:
        """Make the call. Raises the errors of the call, and KeyError: the request has no lease."""
        name = getattr(self, "request", None)
        owner = script.cache if name is None else script.lease(name)
        return results_of(await self._call(script, owner))

    async def _call(self, script: Script, owner: Any, **changed: Any) -> Any:
        """The call of an owner, with the fields that are its parameters. changed: arguments that
        differ from the fields."""
        method = getattr(owner, self.verb)
        if prompt := getattr(self, "tokens", None):
            rng = np.random.default_rng((script.seed, getattr(self, "prompt", 0)))
            changed["tokens"] = random_tokens(rng, prompt)
            media: Iterable[MediaSpec] = getattr(self, "media", ())
            changed["extra_keys"] = [msgspec.structs.astuple(item) for item in media]
        known = inspect.signature(method).parameters
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name in known}
        given = {name: value for name, value in given.items() if value is not None}
        found = method(**given | changed)
        return await found if inspect.isawaitable(found) else found


def results_of(found: Any) -> Results:
    """What a call has returned."""
    if isinstance(found, PromptHits):
        return {"cached_tokens": found.cached_tokens, "hits": tuple(found)}
    if isinstance(found, Cleared):
        return {"blocks": found.device_blocks}
    if isinstance(found, int):
        return {"blocks": found}
    if isinstance(found, tuple):
        return {"blocks": len(found)}
    return {}


# -- calls of the cache


class TimedStep(ScriptStep, frozen=True, kw_only=True):
    """A call with a deadline."""

    deadline: Seconds | None = None


class PauseStep(TimedStep, frozen=True, kw_only=True):
    """Stop admission."""


class ResumeStep(TimedStep, frozen=True, kw_only=True):
    """Admit again."""


class WaitIdleStep(TimedStep, frozen=True, kw_only=True):
    """Wait until nothing is in flight."""


class WaitFlushedStep(TimedStep, frozen=True, kw_only=True):
    """Wait until the sinks have the state of the tiers."""

    sinks: tuple[str, ...] | None = None
    at_rest: bool = True


class ResyncStep(TimedStep, frozen=True, kw_only=True):
    """Send a sink the complete state again."""

    sink: str


class SetNamespaceStep(TimedStep, frozen=True, kw_only=True):
    """Hide cached blocks from later requests."""

    namespace: str


class SetQuotaStep(TimedStep, frozen=True, kw_only=True):
    """Change the quota of a salt."""

    salt: str
    device: BlockSize | None = None
    host: BlockSize | None = None
    storage: BlockSize | None = None


class ClearStep(TimedStep, frozen=True, kw_only=True):
    """Drop all cached blocks, or those of a salt or adapter."""

    storage: bool = False
    erase: bool = False
    salt: str | None = None
    lora: str | None = None
    blocks: Number | None = None


class SleepStep(TimedStep, frozen=True, kw_only=True):
    """Release device memory, and at level 2 host memory."""

    level: Literal[1, 2] = 1


class WakeStep(TimedStep, frozen=True, kw_only=True):
    """End a sleep."""

    async def run(self, script: Script) -> Results:
        await self._call(script, script.cache)
        script.engine.model = Model(script.cache.device)
        return {}


# -- calls of the cache with a prompt


class PromptStep(ScriptStep, frozen=True, kw_only=True):
    """A call with a prompt."""

    prompt: Number = 0
    tokens: Tokens
    media: tuple[MediaSpec, ...] = ()
    salt: str | None = None
    lora: str | None = None


class LookupStep(PromptStep, frozen=True, kw_only=True):
    """Count the cached blocks of a prompt."""

    cached_tokens: Number | None = None
    hits: tuple[Number, Number, Number] | None = None


class PrefetchStep(PromptStep, frozen=True, kw_only=True):
    """Fetch stored blocks into the host tier, in the background."""

    deadline: Seconds | None = None
    blocks: Number | None = None


class UnpinStep(PromptStep, frozen=True, kw_only=True):
    """End the pin of a prompt's blocks."""

    deadline: Seconds | None = None
    blocks: Number | None = None


class AcquireStep(PromptStep, frozen=True, kw_only=True):
    """Take blocks for a prompt, await its loads and verify the loaded blocks."""

    request: str
    lora_id: Number | None = None
    deadline: Seconds | None = None
    wait_for_evictions: bool = True
    wait_for_room: bool = False
    chunk_tokens: Count | None = None
    hints: Hints | None = None
    cached_tokens: Number | None = None
    hits: tuple[Number, Number, Number] | None = None

    async def run(self, script: Script) -> Results:
        lease = await self._call(script, script.cache, request_id=self.request)
        request = script.requests[self.request] = script.engine.request(lease)
        await script.engine.begin(request)
        return {"cached_tokens": lease.cached_tokens, "hits": tuple(lease.hits)}


# -- calls of a lease


class LeaseStep(ScriptStep, frozen=True, kw_only=True):
    """A call of a lease."""

    request: str
    deadline: Seconds | None = None


class NextChunkStep(LeaseStep, frozen=True, kw_only=True):
    """Take blocks for the next chunk of a prompt."""

    num_tokens: Count
    blocks: Number | None = None


class ExtendStep(LeaseStep, frozen=True, kw_only=True):
    """Append tokens."""

    prompt: Number = 0
    tokens: Tokens
    media: tuple[MediaSpec, ...] = ()
    blocks: Number | None = None


class ReserveStep(LeaseStep, frozen=True, kw_only=True):
    """Take blocks ahead of tokens."""

    num_tokens: Number
    blocks: Number | None = None


class TruncateStep(LeaseStep, frozen=True, kw_only=True):
    """Drop the tokens beyond the first."""

    num_tokens: Number
    blocks: Number | None = None

    async def run(self, script: Script) -> Results:
        request = script.requests[self.request]
        dropped = await self._call(script, request.lease)
        request.computed = min(request.computed, self.num_tokens)
        return results_of(dropped)


class CommitStep(LeaseStep, frozen=True, kw_only=True):
    """Compute tokens, and make their full blocks shareable."""

    computed_tokens: Count | None = None
    blocks: Number | None = None

    async def run(self, script: Script) -> Results:
        request = script.requests[self.request]
        tokens = self.computed_tokens or request.lease.covered_tokens
        await request.compute(min(tokens, request.lease.covered_tokens))
        return results_of(await self._call(script, request.lease, computed_tokens=tokens))


class ForkStep(LeaseStep, frozen=True, kw_only=True):
    """Make a second lease of the same tokens."""

    child: str
    wait_for_evictions: bool = True
    wait_for_room: bool = False

    async def run(self, script: Script) -> Results:
        parent = script.requests[self.request]
        made = await self._call(script, parent.lease, request_id=self.child)
        script.add_forks(parent, [made])
        return {}


class ForkManyStep(LeaseStep, frozen=True, kw_only=True):
    """Make further leases of the same tokens, all or none."""

    children: tuple[str, ...]
    wait_for_evictions: bool = True
    wait_for_room: bool = False

    async def run(self, script: Script) -> Results:
        parent = script.requests[self.request]
        names = {"count": len(self.children), "request_ids": self.children}
        script.add_forks(parent, await self._call(script, parent.lease, **names))
        return {}


class EndStep(LeaseStep, frozen=True, kw_only=True):
    """A call that ends a lease."""

    async def run(self, script: Script) -> Results:
        request = script.requests[self.request]
        await script.engine.verify(request, 0, request.known, "held")
        await self._call(script, request.lease)
        return {"pinned_blocks": request.lease.pinned_blocks}


class FinishStep(EndStep, frozen=True, kw_only=True):
    """Verify all computed blocks and end the request."""

    computed_tokens: Number | None = None
    output_tokens: Number | None = None
    hints: Hints | None = None
    pinned_blocks: Number | None = None


class PreemptStep(EndStep, frozen=True, kw_only=True):
    """End the lease. An acquire of this name resumes the request."""

    computed_tokens: Number = 0


class AbandonStep(ScriptStep, frozen=True, kw_only=True):
    """End the lease without waiting for an answer."""

    request: str


AnyStep = (
    AcquireStep
    | NextChunkStep
    | ExtendStep
    | ReserveStep
    | TruncateStep
    | CommitStep
    | ForkStep
    | ForkManyStep
    | FinishStep
    | PreemptStep
    | AbandonStep
    | LookupStep
    | PrefetchStep
    | UnpinStep
    | ClearStep
    | SetQuotaStep
    | SetNamespaceStep
    | PauseStep
    | ResumeStep
    | SleepStep
    | WakeStep
    | WaitIdleStep
    | WaitFlushedStep
    | ResyncStep
)
"""A step. The key `do` is its verb."""


class Script:
    """Runs the steps of a script. An unexpected result is an error in the totals."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.seed = seed
        self.requests: dict[str, ScenarioRequest] = {}

    def lease(self, request: str) -> Any:
        """The lease of a request, which may have ended."""
        return self.requests[request].lease

    def add_forks(self, parent: ScenarioRequest, leases: Iterable[Any]) -> None:
        """The forks have the contents of their parent."""
        for lease in leases:
            fork = self.requests[lease.request_id] = self.engine.request(lease)
            fork.computed = parent.computed

    async def run(self, steps: Iterable[AnyStep]) -> None:
        """Run every step, in order. Leases left open at the end are finished."""
        for number, step in enumerate(steps):
            if fault := await self._fault_of(step):
                name = f"{step.verb} {getattr(step, 'request', '')}".strip()
                self.engine.totals.complain(f"workload.step[{number}] ({name}): {fault}")
        for request in self.requests.values():
            with suppress(LeaseEnded):
                await request.lease.finish()

    async def _fault_of(self, step: AnyStep) -> str:
        try:
            results = await step.run(self)
        except KeyError:
            return "the request has no lease"
        except (KVActorsError, ValueError) as error:
            self.engine.totals.no_room += isinstance(error, errors.NoRoom)
            wanted = vars(errors).get(step.expect, ValueError)
            if step.expect != "ok" and isinstance(error, wanted):
                return ""
            return f"{type(error).__name__}: {error}, and {step.expect} was expected"
        if step.expect != "ok":
            return f"ok, and {step.expect} was expected"
        for name, value in results.items():
            if (wanted := getattr(step, name, None)) is not None and wanted != value:
                return f"{name} is {value}, and {wanted} was expected"
        return ""
