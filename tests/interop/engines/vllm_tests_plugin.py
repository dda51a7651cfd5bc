"""A pytest plug-in for vLLM's own tests: a local model in the place of one from a hub.

It runs in vLLM's environment. The model's folder is in the variable ENGINE_TEST_MODEL.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


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
    """Let `create_vllm_config` of vLLM's tests take the local model."""
    folder = Path(os.environ["ENGINE_TEST_MODEL"])
    write_tokenizer(folder)
    from tests.v1.kv_connector.unit import utils

    _, *others = utils.create_vllm_config.__defaults__
    utils.create_vllm_config.__defaults__ = (str(folder), *others)
