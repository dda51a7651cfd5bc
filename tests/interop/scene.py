"""A case: workers, the consumers that follow them, and the comparison of their blocks and answers
with the truth."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.consumers.base import Index, Source
from tests.interop.consumers.indexer import Indexer
from tests.interop.consumers.router import Router
from tests.interop.consumers.selection import Selection
from tests.interop.environments import Environments
from tests.interop.link import Link
from tests.interop.node import Node
from tests.interop.processes import Child, wait_until
from tests.interop.truth import TIERS, Truth
from tests.interop.workload import Workload

TYPES = Path(__file__).with_name("consumers") / "message_types_child.py"
PASSED_OVER = {"vllm": {"cache_salt", "block_mm_infos"}, "sglang": {"extra_keys", "block_mm_infos"}}
"""By engine: fields of ours that its types do not have."""
CATCH_UP = 15.0
"""Seconds within which an index must match the truth. Only a wrong index takes as long."""
ASKED = 300
"""Prompts that each index is asked about in a comparison."""
REQUESTED = 30
"""Prompts that are requested, and compared with the indexes' answers just before."""


class Scene:
    """Everything that one case starts. counts: what was compared. wrong: answers that differ from
    the truth, one line each."""

    def __init__(self, environments: Environments, folder: Path) -> None:
        self.environments = environments
        self.folder = folder
        self.nodes: list[Node] = []
        self.links: list[Link] = []
        self.indexes: list[Any] = []
        self.programs: list[Any] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._behind: set[str] = set()

    # -- workers and consumers

    def node(
        self,
        workload: Workload,
        *,
        worker: int = 7,
        rank: int = 0,
        tables: dict[str, Any] | None = None,
        **sink: Any,
    ) -> Node:
        """A worker's rank. worker: an id, from which its ports follow. tables: of its settings,
        sink: of its kv_events sink."""
        port = 5600 + 100 * len({one.source.worker for one in self.nodes} - {worker})
        base = (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 50}")
        source = Source(
            worker, rank, f"tcp://127.0.0.1:{port + rank}", f"tcp://127.0.0.1:{port + 50 + rank}"
        )
        node = Node(self.folder, source, base, workload, sink, tables or {})
        self.nodes.append(node)
        node.start()
        return node

    def link(self, node: Node) -> tuple[Link, Source]:
        """A link to a worker's events that can be cut, and the source as consumers see it. Replay
        goes past the link."""
        link = Link(node.source.endpoint)
        self.links.append(link)
        return link, node.source._replace(endpoint=link.endpoint)

    def dynamo(self, *sources: Source) -> list[Index]:
        """Dynamo's SelectionService and its standalone indexer. Both follow the ranks of each
        worker."""
        selection = Selection(self.environments, self.folder)
        self.indexes.append(selection)
        self.indexes.append(Indexer(self.environments, self.folder, selection.block_hashes))
        for index in self.indexes:
            for worker in sorted({source.worker for source in sources}):
                index.register(*(source for source in sources if source.worker == worker))
        return self.indexes

    def router(self, nodes: Sequence[Node]) -> Router:
        """vLLM's router in front of a stub for each worker."""
        router = Router(self.environments, self.folder, [node.source for node in nodes])
        self.programs.append(router)
        return router

    def follow(self, node: Node, indexes: Sequence[Index]) -> None:
        """Return once every index gets what a worker publishes, with nothing cached any more. One
        that asks for no replay lacks what was published before it got there, which its
        registration does not wait for."""

        def arrives() -> bool:
            node.serve(1)
            return all(any(index.held(node.source).values()) for index in indexes)

        wait_until("indexes get what a worker publishes", arrives)
        node.clear(storage=True)

    # -- comparisons

    def catch_up(
        self,
        node: Node,
        indexes: Sequence[Index],
        truth: Truth | None = None,
        source: Source | None = None,
    ) -> Truth:
        """Compare the sets of blocks that indexes hold with the truth, as soon as they agree or
        after CATCH_UP seconds."""
        truth = truth or node.truth()
        for index in indexes:
            until = time.monotonic() + (CATCH_UP if index.name not in self._behind else 0.5)
            while (
                held := index.held(source or node.source)
            ) != truth.announced and time.monotonic() < until:
                time.sleep(0.05)
            self.counts["sets compared"] += len(TIERS)
            for tier in TIERS:
                lacking, extra = (
                    truth.announced[tier] - held[tier],
                    held[tier] - truth.announced[tier],
                )
                if lacking or extra:
                    self._behind.add(index.name)
                    self.wrong.append(
                        f"{index.name}: {tier}: lacks {len(lacking)} of "
                        f"{len(truth.announced[tier])} blocks, has {len(extra)} too many"
                    )
        return truth

    def compare(
        self,
        node: Node,
        indexes: Sequence[Index],
        *,
        asked: int = ASKED,
        requested: int = REQUESTED,
    ) -> Truth:
        """Compare sets, answers about prompts, and what requests get. Returns the truth that
        answers were compared with."""
        truth = self.catch_up(node, indexes)
        for tier in TIERS:
            self.counts[f"blocks on {tier}"] += len(truth.announced[tier])
        prompts = node.workload.asked(asked)
        chains = node.chains(prompts)
        for index in indexes:
            for chain, answer in zip(chains, index.answers(node.source, prompts), strict=True):
                wanted = truth.answer(chain)
                self.counts["prompts asked about"] += 1
                self.counts["prompts present"] += wanted.total > 0
                if answer.device != wanted.device or (answer.host >= 0 and answer != wanted):
                    self.wrong.append(
                        f"{index.name}: answers {tuple(answer)} about a prompt of {len(chain)} "
                        f"blocks, not {tuple(wanted)}"
                    )
        for prompt in node.workload.asked(requested):
            self._request(node, indexes, prompt)
        return truth

    def _request(self, node: Node, indexes: Sequence[Index], prompt: Any) -> None:
        """Ask the indexes about a prompt, then request it."""
        node.workload.drawn.append(prompt)
        truth, (chain,) = node.truth(), node.chains([prompt])
        self.catch_up(node, indexes, truth)
        answers = [index.answers(node.source, [prompt])[0] for index in indexes]
        got, cached, wanted = sum(node.request(prompt)), truth.cached(chain), truth.answer(chain)
        self.counts["prompts requested"] += 1
        if got != cached and not prompt.media:  # a media item is hit as a whole or not at all
            self.wrong.append(f"a request got {got} blocks; the tiers held {cached}")
        for index, answer in zip(indexes, answers, strict=True):
            # Blocks above which another one is on a lower tier are not counted by these indexes.
            if answer.device != wanted.device or (
                answer.host >= 0 and (answer != wanted or answer.total > cached)
            ):
                self.wrong.append(
                    f"{index.name}: answered {tuple(answer)} about a prompt of which the request "
                    f"got {got} blocks"
                )

    def judge(self) -> None:
        """The end of a case: the message types of the engines take every recorded message, and
        nothing was wrong."""
        for node in self.nodes:
            node.recorder.take()
            payloads = [message.payload for message in node.recorder.messages]
            assert payloads, "no message was recorded"
            engines = ("vllm", "sglang") if node.dialect == "map" else ("vllm",) * node.for_engines
            for engine in engines:
                found = self._check_types(engine, node.dialect, payloads)
                self.counts[f"messages through {engine}'s types"] += found["messages"]
                self.wrong += [f"{engine}'s types: {line}" for line in found["wrong"]]
                unexpected = set(found["fields_passed_over"]) - PASSED_OVER[engine]
                if unexpected:
                    self.wrong.append(
                        f"{engine}'s types do not have the fields {sorted(unexpected)}"
                    )
        print(dict(self.counts))
        assert not self.wrong, f"{len(self.wrong)} wrong:\n" + "\n".join(self.wrong[:20])

    def _check_types(self, engine: str, dialect: str, payloads: Sequence[bytes]) -> Any:
        """What an engine's own message types make of messages (`message_types_child.Types`)."""
        command = [self.environments.program(engine), "-P", str(TYPES), engine]
        child = Child(f"{engine}'s types", command, self.folder / f"types-{engine}.log", lines=True)
        texts = [base64.b64encode(payload).decode() for payload in payloads]
        try:
            return child.ask({"do": "check", "dialect": dialect, "payloads": texts})
        finally:
            child.close()

    def close(self) -> None:
        """End everything."""
        for one in (*self.programs, *self.indexes, *self.nodes, *self.links):
            one.close()
