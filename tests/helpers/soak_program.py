"""`specjax serve` with two more routes for `benchmarks/soak.py`, and the small random models that it serves there.

    python tests/helpers/soak_program.py --model FOLDER [flags of specjax serve]

POST /soak/state: checks pages, slots and the prefix cache, and returns the counts that an idle server must return to.
POST /soak/fail: the engine's next step raises.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from integrity import check_integrity

from specjax.cli import serve
from specjax.engine import Engine
from specjax.serve.__main__ import main
from specjax.serve.app import Extension, Generation
from specjax.serve.control import on_all

CONTEXT = 1024
DRAFT_WORDS = 16  # vocabulary of the draft heads


def save_models(folder: Path) -> None:
    """A target with an MTP layer, and under it `eagle3`, `block` and `model`, drafts for it."""
    import numpy as np
    from chat_templates import VOCABULARY, family_tokenizer
    from tiny_blocks import save_block
    from tiny_checkpoints import save_llama, save_mtp
    from tiny_heads import save_head

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "eos_token_id": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
    }  # fmt: skip
    save_mtp(folder, "MiMoForCausalLM", "mimo", num_hidden_layers=3, head_dim=8, tie_word_embeddings=False, **sizes)
    save_llama(folder / "model", num_hidden_layers=1, **sizes)
    for model in (folder, folder / "model"):
        family_tokenizer("qwen2.5").save_pretrained(model)
    letters = np.arange(70, 70 + DRAFT_WORDS)
    save_head(
        folder / "eagle3", "eagle3", target_hidden_size=32, hidden_size=32, target_vocab_size=VOCABULARY,
        draft_vocab_size=DRAFT_WORDS, aux_layers=2,
        config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "max_position_embeddings": CONTEXT},
    )  # fmt: skip
    save_block(
        folder / "block", "speculators-dspark", width=32, vocab=VOCABULARY, features=(0, 1), words=letters,
        config={"num_target_layers": 3},
    )  # fmt: skip


def state_of(engine: Engine) -> dict[str, Any]:
    scheduler, problem = engine.scheduler, None
    try:
        check_integrity(engine)
    except AssertionError as error:
        problem = str(error)
    return {
        "problem": problem,
        "pages": len(scheduler.free_pages) + scheduler.prefix.evictable,
        "slots": len(scheduler._free_slots),
        "sequences": len(engine.runtime.sequences),
    }


def fail_once(engine: Engine) -> None:
    def fail() -> Any:
        del engine._plan
        raise RuntimeError("injected by /soak/fail")

    engine._plan = fail


def add_routes(app: FastAPI, generation: Generation) -> None:
    runner = generation.runner

    @app.post("/soak/state")
    async def state(collect: bool = False) -> dict[str, Any]:
        if collect:
            await asyncio.to_thread(gc.collect)
            if sys.platform == "linux":
                ctypes.CDLL(None).malloc_trim(0)
        (counts,) = await on_all(runner, lambda rank: rank.call(state_of))
        return counts | {"places": runner.places.taken}

    @app.post("/soak/fail")
    async def fail() -> dict[str, Any]:
        await on_all(runner, lambda rank: rank.call(fail_once))
        return {}


usual = serve.extensions


def extensions() -> list[Extension]:
    return [*usual(), Extension(add_routes)]


if __name__ == "__main__":
    serve.extensions = extensions
    sys.exit(main())
