"""The smoke test of the trunk for tests/wings/test_wings.py, run in a copy of the packages without one of the wings.

The texts of a tiny random Llama must not depend on the drafter, and the server's application must answer. Prints the
paths of the application as JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
from engine_helpers import NGRAM, VOCABULARY, tokenizer
from toy_models import tiny_llama

import specjax
from specjax.config import HeadConfig, RopeConfig
from specjax.drafters import Params, TreeShape, eagle_drafter, make_speculation
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.models.draft_head import init_head_params
from specjax.serve.app import create_app
from specjax.serve.errors import State
from specjax.serve.runner import Runner
from specjax.serve.server_settings import ServerSettings

PROMPTS = ["abcabcabc", "hello"]
SAMPLING = [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)]
HEAD = HeadConfig(
    kind="eagle", hidden_size=16, feature_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8,
    norm_epsilon=1e-5, vocab_size=VOCABULARY, rope=RopeConfig(theta=100.0),
)  # fmt: skip
CONFIG = EngineConfig(
    max_running_requests=2, page_size=4, max_total_tokens=256, context_length=64, chunked_prefill_size=16
)


def random_head(target: Any) -> Any:
    rng = np.random.default_rng(1)
    params = dict(init_head_params(HEAD, target, jax.random.key(1)))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), params)


def make_engines() -> list[Engine]:
    model = tiny_llama(vocab_size=VOCABULARY)
    target, head = model.target, random_head(model.target)
    drafters = [
        (make_speculation("NONE"), None, None),
        (make_speculation(NGRAM), None, None),
        (eagle_drafter(target, HEAD, TreeShape(2, 2, 4)), head, HEAD),
    ]
    return [
        Engine(target, Params(model.params, params), tokenizer(), drafter, config=CONFIG, draft_model=description)
        for drafter, params, description in drafters
    ]


async def answers(app: Any) -> list[Any]:
    bodies = {
        "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=300) as client:
        return [(await client.post(path, json=body)).raise_for_status().json() for path, body in bodies.items()]


def main() -> None:
    assert Path(specjax.__file__).parents[1] == Path.cwd(), "the copy is imported, not the installed package"
    engines = make_engines()
    texts = [[done.output_ids for done in engine.generate(PROMPTS, SAMPLING)] for engine in engines]
    assert texts[0] == texts[1] == texts[2], texts
    assert all(engine.counters.drafted_steps for engine in engines[1:])
    settings = ServerSettings()
    runner = Runner(lambda: engines[1], settings, warm_up=False)
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
