"""The smoke test of the trunk for tests/wings/test_wings.py, run in a copy of the packages without one of the wings.

A tiny random Llama with n-gram drafts must generate, and the server's application must answer. Prints the paths of the
application as JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import httpx
from engine_helpers import NGRAM, VOCABULARY, make_engine
from toy_models import tiny_llama

import specjax
from specjax.engine import SamplingParams
from specjax.serve.app import create_app
from specjax.serve.errors import State
from specjax.serve.runner import Runner
from specjax.serve.server_settings import ServerSettings


async def answers(app: Any) -> list[Any]:
    bodies = {
        "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=300) as client:
        return [(await client.post(path, json=body)).raise_for_status().json() for path, body in bodies.items()]


def main() -> None:
    assert Path(specjax.__file__).parents[1] == Path.cwd(), "the copy is imported, not the installed package"
    engine = make_engine(tiny_llama(vocab_size=VOCABULARY), NGRAM)
    done = engine.generate("abcabcabc", SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert len(done.output_ids) == 12 and engine.counters.drafted_steps
    settings = ServerSettings()
    runner = Runner(lambda: engine, settings, warm_up=False)
    make = create_app
    if importlib.util.find_spec("specjax.cli"):
        from specjax.cli import serve

        make = serve.make_app
    app = make(runner, settings, model="tiny")
    runner.start()
    while runner.state is State.LOADING:
        time.sleep(0.01)
    generated, chat = asyncio.run(answers(app))
    assert generated["meta_info"]["completion_tokens"] == chat["usage"]["completion_tokens"] == 4
    assert runner.stop(60)
    print(json.dumps(sorted(app.openapi()["paths"])))


if __name__ == "__main__":
    main()
