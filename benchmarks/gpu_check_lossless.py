"""Part `lossless` of `gpu_check.py`: the same greedy text with every algorithm, on the device.

In float32 the texts of no speculation, n-gram and EAGLE-3 (an untrained head: right now and then, since the random
models have few tokens) are equal, token for token, except where the two best logits lie closer than `NEAR`. Each text
is judged on its own too, by one dense forward over it in float32 (the definition of attention, no pages): how far the
chosen token's logit is below the best one. In bfloat16 both bounds are `HALF` times the largest logit there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu_check_report import Report, say
from llama_shapes import eagle3_head, normal, random_head, random_target
from specjax_kernels import CAUSAL

from specjax import (
    ModelConfig,
    Params,
    PoolShape,
    PrefillInput,
    RopeConfig,
    StepConfig,
    StepInput,
    checkpoint,
    init_cache,
    init_state,
    make_drafter,
    make_steps,
    make_target,
    new_row,
)
from specjax.checkpoint.files import default_cache_dir
from specjax.drafters import Drafter
from specjax.drafters.table import options_of
from specjax.models.target import Target

NEAR = 1e-3
"""float32: logits that are closer may come out the other way round."""

HALF = 0.02
"""bfloat16: the same, as a share of the largest logit. On a CPU the worst seen was 0.007 (SmolLM2, random models)."""

PROMPTS_FILE = "gpu_check_prompts.json"
"""Beside exported weights: token ids of prompts, so that no tokenizer is needed."""

DRAFTS: dict[str, tuple[str, dict[str, int]]] = {
    "NONE": ("NONE", {}),
    "NGRAM": ("NGRAM", {}),
    "EAGLE3 chain": ("EAGLE3", {"steps": 3, "topk": 1, "nodes": 4}),
    "EAGLE3 tree": ("EAGLE3", {"steps": 5, "topk": 8, "nodes": 32}),
}
TINY_DRAFTS: dict[str, tuple[str, dict[str, int]]] = {
    "NONE": ("NONE", {}),
    "NGRAM": ("NGRAM", {"capacity": 1024, "nodes": 4}),
    "EAGLE3 tree": ("EAGLE3", {"steps": 2, "topk": 3, "nodes": 9}),
}


class Case(NamedTuple):
    name: str
    config: ModelConfig
    prompts: list[list[int]]
    params: Any  # dtype -> the target's


class Text(NamedTuple):
    tokens: list[int]
    steps: int  # verification forwards


def lossless(report: Report) -> None:
    """All models, both dtypes, all algorithms."""
    plan = report.plan
    tokens, page_size = (12, 4) if plan.tiny else (64, plan.page_size)
    cases = _cases(report)
    for index, implementation in enumerate(plan.implementations):  # the first one's texts before the others'
        for case in cases:
            for dtype in ("float32", "bfloat16"):
                name = f"{case.name} {dtype} {implementation}"
                if report.in_time(name, needs=0 if plan.tiny else 30, check=index == 0):
                    with report.attempt(name, check=True), _exact(dtype):
                        _compare(report, name, case, dtype, implementation, tokens, page_size)


def _exact(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """float32 on a GPU is TF32 unless one asks. Of the thread that enters it alone."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()


def _cases(report: Report) -> list[Case]:
    """SmolLM2 if it is there, and random models: groups of 1, 4 and 3 heads, heads of 64 and 128."""
    plan, rng = report.plan, np.random.default_rng(report.plan.seed)
    if plan.tiny:
        shapes, lengths, vocab, layers, width = [(4, 2, 16)], (3, 9), 16, 2, 32
    else:
        shapes, lengths, vocab = [(4, 4, 64), (8, 2, 128), (9, 3, 64)], (3, 17, 64, 200, 513, 1100), 32
        layers, width = 6, 256
    cases = []
    with report.attempt("SmolLM2", check=True):
        cases += _files(report)
    for heads, kv_heads, head in shapes:
        config = ModelConfig(
            "llama", vocab, width, 2 * width, layers, heads, kv_heads, head, 1e-5, RopeConfig(), 4096,
            tied_embeddings=False,
        )  # fmt: skip
        prompts = [rng.integers(0, vocab, length).tolist() for length in lengths]

        def params(dtype: str, config: ModelConfig = config) -> Any:
            made = random_target(config, plan.seed)
            made = made | {"head": 4 * made["head"]}  # logits a few apart, as trained models' are
            return jax.tree.map(lambda leaf: leaf.astype(dtype), made)

        cases.append(Case(f"random {heads}/{kv_heads}x{head}", config, prompts, params))
    return cases


def _files(report: Report) -> list[Case]:
    """The model of --model, or the built-in one if it has been converted here before; nothing is downloaded."""
    model = report.plan.model
    if model is None:
        here = [] if report.plan.tiny else sorted(default_cache_dir().glob(f"models/{checkpoint.BUILT_IN_MODEL}-*/"))
        if not here:
            report.note("SmolLM2: not there, skipped (--model, see --export-model)")
            return []
        model = str(here[-1])
    files = checkpoint.resolve(model, progress=False)
    config = checkpoint.model_config(files.config, dtype="float32")
    listed = files.folder / PROMPTS_FILE
    if listed.is_file():
        prompts = json.loads(listed.read_text())
    else:
        rng = np.random.default_rng(report.plan.seed)
        prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in (5, 40, 300)]
    prompts = prompts[:2] if report.plan.tiny else prompts

    def params(dtype: str) -> Any:
        typed = dataclasses.replace(config, dtype=dtype)
        return checkpoint.load_params(files, typed, quantization="none", progress=False)

    return [Case(Path(model).name, config, prompts, params)]


def _compare(
    report: Report, name: str, case: Case, dtype: str, implementation: str, tokens: int, page_size: int
) -> None:
    config = dataclasses.replace(case.config, dtype=dtype)
    target, head = make_target(config, backend=implementation), eagle3_head(config)
    params = Params(case.params(dtype), random_head(head, config, report.plan.seed + 1))
    texts: dict[str, list[Text]] = {}
    drafts = TINY_DRAFTS if report.plan.tiny else DRAFTS

    def generate(algorithm: str, options: dict[str, int]) -> list[Text]:
        with _exact(dtype):
            drafter = make_drafter(options_of(algorithm, **options), target=target, head=head, backend=implementation)
            return _generate(
                target, params, drafter, case.prompts, tokens, page_size, several_widths=report.plan.several_widths
            )

    with ThreadPoolExecutor(len(drafts)) as pool:  # nearly all the time is XLA's, which compiles them side by side
        begun = {label: pool.submit(generate, *draft) for label, draft in drafts.items()}
        for label, future in begun.items():
            with report.attempt(f"{name} {label}", check=True):
                texts[label] = future.result()
    if "NONE" not in texts:
        return
    judge = _judge_of(case, params.target)
    plain = [judge(prompt, text.tokens) for prompt, text in zip(case.prompts, texts["NONE"], strict=True)]
    for label, found in texts.items():
        equal, partings, worst = 0, [], 0.0
        for index, (prompt, text, other) in enumerate(zip(case.prompts, found, texts["NONE"], strict=True)):
            own = plain[index] if label == "NONE" else judge(prompt, text.tokens)
            bound = np.full(tokens, NEAR) if dtype == "float32" else HALF * own.largest
            short = own.best - own.chosen
            worst = max(worst, float((short / bound).max()))
            pairs = zip(text.tokens, other.tokens, strict=True)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            equal += at is None
            if at is not None:
                gap, limit = float(plain[index].best[at] - plain[index].second[at]), float(bound[at])
                partings.append({"prompt": index, "at": at, "gap": gap, "bound": limit})
                told = f"prompt {index} parts from NONE at {at}, gap {gap:.2e}, bound {limit:.2e}"
                say(f"  {name} {label}: {told}{'' if gap < limit else '  ABOVE THE BOUND'}")
                report.check(gap < limit, f"{name} {label}: {told}")
        steps = sum(text.steps for text in found)
        accept = (tokens - 1) * len(found) / steps
        say(f"{name:36} {label:13} {equal}/{len(found)} equal to NONE   worst shortfall {worst:6.3f} of the bound   "
            f"accept length {accept:.2f}")  # fmt: skip
        report.check(worst < 1, f"{name} {label}: a token is {worst:.2f} bounds below the best one")
        report.add(
            "text", model=case.name, dtype=dtype, implementation=implementation, algorithm=label, prompts=len(found),
            tokens=tokens, equal=equal, partings=partings, worst_shortfall=round(worst, 4),
            accept_length=round(accept, 3),
        )  # fmt: skip
    report.check(len(texts) == len(drafts), f"{name}: {len(texts)} of {len(drafts)} algorithms ran")


def _generate(
    target: Target,
    params: Params,
    drafter: Drafter,
    prompts: list[list[int]],
    tokens: int,
    page_size: int,
    *,
    several_widths: bool,
) -> list[Text]:
    """Greedy, all prompts in one batch, the steps called as the engine calls them. Pages lie anywhere, and hold another
    request's leftovers."""
    rows, chunk = len(prompts), min(256, max(map(len, prompts)))
    width = -(-(max(map(len, prompts)) + tokens + drafter.depth + 1) // page_size)
    pool = PoolShape(rows * width + 1, page_size)
    table = np.random.default_rng(0).permutation(pool.pages)[: rows * width].reshape(rows, width).astype(np.int32)
    # On a GPU the engine, too, compiles one width for a batch.
    steps = make_steps(target, drafter, config=StepConfig() if several_widths else StepConfig((drafter.width,)))
    state = init_state(params, target, drafter, rows=rows, pool=pool)
    keys = jax.random.split(jax.random.key(9), 2 * target.config.num_layers)
    leaves, tree = jax.tree.flatten(state.cache)
    leftovers = [normal(leaf, key) for leaf, key in zip(leaves, keys, strict=True)]
    state = state._replace(cache=jax.tree.unflatten(tree, leftovers))
    for slot, prompt in enumerate(prompts):
        row = new_row(target.config.vocab_size, limit=tokens, prompt=prompt)
        state = steps.admit(state, np.int32(slot), row)

    def batch(active: list[bool]) -> StepInput:
        return StepInput(*map(jnp.asarray, (np.arange(rows, dtype=np.int32), table, np.array(active))))

    texts: list[list[int]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        parts = [prompt[start : start + chunk] for prompt in prompts]
        block = np.zeros((rows, chunk), np.int32)
        following = np.full(rows, -1, np.int32)
        for row, part in enumerate(parts):
            block[row, : len(part)] = part
            if start + chunk < len(prompts[row]):
                following[row] = prompts[row][start + chunk]
        given = map(jnp.asarray, (block, np.array([max(1, len(part)) for part in parts], np.int32), following))
        state, output = steps.prefill(params, state, PrefillInput(*batch([bool(part) for part in parts])[:3], *given))
        _take(texts, output)
    count = [0] * rows
    for _ in range(tokens):
        running = [len(text) < tokens for text in texts]
        if not any(running):
            break
        state, output = steps.speculate(params, state, batch(running))
        _take(texts, output)
        count = [before + now for before, now in zip(count, running, strict=True)]
    assert all(len(text) == tokens for text in texts), f"texts of {[len(text) for text in texts]} tokens"
    return [Text(text, number) for text, number in zip(texts, count, strict=True)]


def _take(texts: list[list[int]], output: Any) -> None:
    for text, new, emitted in zip(texts, np.asarray(output.tokens), np.asarray(output.emitted), strict=True):
        text.extend(new[:emitted].tolist())


class Judged(NamedTuple):
    """Logits in float32 at each token of a text, given what stands before it. All [tokens]."""

    best: np.ndarray
    second: np.ndarray
    chosen: np.ndarray  # of the token that was emitted
    largest: np.ndarray  # in size


def _judge_of(case: Case, weights: Any) -> Any:
    """(prompt, text) -> Judged, by one forward in float32 without pages, whatever dtype the text was made in."""
    config = dataclasses.replace(case.config, dtype="float32")
    target = make_target(config, backend="reference")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    cache = init_cache(target.pages, PoolShape(1, 1))
    longest = max(map(len, case.prompts))

    @jax.jit
    def forward(weights: Any, tokens: jax.Array, where: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        nothing, hole = jnp.zeros(1, jnp.int32), jnp.ones((1, 1), jnp.int32)
        embedded = target.embed(weights, tokens)
        output = target.forward(weights, embedded, positions, CAUSAL, cache, hole, nothing)
        return target.unembed(weights, output.hidden[:, where])[0]

    def judge(prompt: list[int], text: list[int]) -> Judged:
        tokens = np.zeros((1, longest + len(text)), np.int32)
        tokens[0, : len(prompt) + len(text)] = prompt + text
        where = np.arange(len(prompt) - 1, len(prompt) + len(text) - 1, dtype=np.int32)
        logits = np.asarray(forward(wide, jnp.asarray(tokens), jnp.asarray(where)))
        two = np.partition(logits, -2, axis=1)[:, -2:]
        return Judged(two[:, 1], two[:, 0], logits[np.arange(len(text)), text], np.abs(logits).max(1))

    return judge
