"""A small model for `specjax generate`, and flags that compile little."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from engine_helpers import VOCABULARY, tokenizer
from tiny_checkpoints import save_llama

from specjax.engine import Engine

QUICK = [
    "--max-running-requests", "2", "--max-new-tokens", "8", "--speculative-num-draft-tokens", "4",
    "--speculative-ngram-max-match-window-size", "4", "--speculative-ngram-capacity", "4096",
    "--chunked-prefill-size", "16", "--no-progress", "--no-speculative-adaptive",
]  # fmt: skip


def saved_model(folder: Path, **changes: Any) -> str:
    """Fills a folder as Hugging Face does, with a tokenizer and a chat template."""
    save_llama(folder, vocab_size=VOCABULARY, num_hidden_layers=1, initializer_range=0.3, eos_token_id=2, **changes)
    tokenizer().save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def shared_engines() -> Iterator[dict[str, Engine]]:
    """Commands with equal arguments and model files share an engine, since each compiles for seconds."""
    load, engines = Engine.from_pretrained, dict[str, Engine]()

    def shared(**given: Any) -> Engine:
        files = sorted((file.name, file.stat().st_mtime_ns) for file in Path(given["model"]).glob("*.json"))
        key = repr((files, sorted((name, value) for name, value in given.items() if name != "progress")))
        engines[key] = engines.pop(key, None) or load(**given)  # the last one
        return engines[key]

    with mock.patch.object(Engine, "from_pretrained", shared):
        yield engines


def saved_prompts(folder: Path, count: int) -> str:
    """A file with conversations of one and two turns, for `specjax bench`."""
    lines = [{"id": str(i), "turns": [f"{i} {i} 1 2 1 2", "3 4"][: 1 + i % 2]} for i in range(count)]
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "mine.jsonl")
