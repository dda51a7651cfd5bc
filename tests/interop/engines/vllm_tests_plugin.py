"""A pytest plug-in for vLLM's own tests: a local model in the place of one from a hub, and time for
processes that import vLLM on a busy machine.

It runs in vLLM's environment. The model's folder is in the variable ENGINE_TEST_MODEL.
"""

from __future__ import annotations

import json
import os
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

HANG = 900.0
"""Seconds for an answer of another process. Only a hang takes as long."""


def wait_longer(kind: Any, name: str, position: int) -> None:
    """Replace time-outs of 10 s and more of a method. vLLM's tests give new processes 30 s to
    import vLLM. Shorter ones are those of loops that poll.

    Args:
        kind: class of the method.
        name: of the method.
        position: of its argument `timeout`, after `self`.
    """
    call = getattr(kind, name)

    def patient(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) > position:
            *args, options["timeout"] = args[: position + 1]
        if (options.get("timeout") or 0.0) >= 10.0:
            options["timeout"] = HANG
        return call(self, *args, **options)

    setattr(kind, name, patient)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the words w0, w1 .. beside a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def pytest_configure() -> None:
    """Let `create_vllm_config` of vLLM's tests take the local model, and processes their time."""
    wait_longer(Queue, "get", 1)
    wait_longer(BaseProcess, "join", 0)
    folder = Path(os.environ["ENGINE_TEST_MODEL"])
    write_tokenizer(folder)
    from tests.v1.kv_connector.unit import utils

    _, *others = utils.create_vllm_config.__defaults__
    utils.create_vllm_config.__defaults__ = (str(folder), *others)
