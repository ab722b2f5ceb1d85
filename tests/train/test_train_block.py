"""Training of block heads: packed rows against serving, anchors, weights, and runs whose heads draft in the engine."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import VOCABULARY
from train_helpers import arguments

from specjax import checkpoint
from specjax.cache import PoolShape
from specjax.config import BlockConfig, ModelConfig, RopeConfig
from specjax.drafters import Block, Context, Observation, Params, TreeShape, block_drafter
from specjax.engine import Engine, SamplingParams
from specjax.models import init_params, make_target
from specjax.models.block_head import BlockHead
from specjax.models.draft_head import init_head_params
from specjax.sampling import sampling_row
from specjax.train.__main__ import main
from specjax.train.data import Example, Rows, pack
from specjax.train.export import export_head
from specjax.train.features import teach, training_target
from specjax.train.head import from_head
from specjax.train.losses import (
    BLOCKS,
    BlockObjective,
    Teacher,
    block_attention,
    block_logits,
    block_loss,
    draw_anchors,
    packed_attention,
)
from specjax.train.options import BlockSettings, DraftSettings
from specjax.train.output import read_metrics

V, M, W, BLOCK = 19, 16, 9, 4
TEXT = 16
"""Longest text before a draft."""
TARGET = ModelConfig("llama", V, M, 24, 4, 4, 2, 8, 1e-5, RopeConfig(theta=500.0), 64, tied_embeddings=True)
PLAIN = BlockConfig(
    hidden_size=M, feature_size=2 * M, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, norm_epsilon=1e-5,
    rope=RopeConfig(theta=700.0), vocab_size=V, aux_layers=(0, 2), layers=2, block=BLOCK, mask_token=V - 1,
    from_anchor=False, windows=(None, None), causal=(False, False),
)  # fmt: skip
MAPPED: dict[str, Any] = {"vocab_size": W, "own_head": True, "mapped": True}
SELECTOR: dict[str, Any] = {"walk": "selector", "rank": 5, "candidates": 4, "conv_taps": 2, "conv_groups": 4}
HEADS = {
    "dflash": PLAIN,
    "mapped": replace(PLAIN, **MAPPED),
    "window": replace(PLAIN, windows=(3, None), causal=(True, False)),
    "from anchor": replace(PLAIN, from_anchor=True),
    "dspark": replace(PLAIN, walk="vanilla", rank=5, **MAPPED),
    "rnn": replace(PLAIN, walk="rnn", rank=5),
    "dflash2": replace(PLAIN, **SELECTOR),
    "dflash2 mapped": replace(PLAIN, windows=(3, None), **SELECTOR, **MAPPED),
}
NEW_WALKS: dict[str, dict[str, Any]] = {
    "DSPARK": {"walk": "vanilla", "rank": 6},
    "DFLASH2": {"walk": "selector", "rank": 6, "conv_taps": 2, "conv_groups": 1},
}
IDS = np.array([1, 2, 5, 6, 8, 11, 12, 17, 18], np.int32)


class World:
    """A tiny target, a head with large random weights, and packed rows with random outputs of the target."""

    def __init__(self, name: str, seed: int = 3) -> None:
        self.config, self.rng = HEADS[name], np.random.default_rng(seed)
        self.target, self.target_params = make_target(TARGET), init_params(TARGET, jax.random.key(0))
        params = init_head_params(self.config, self.target, jax.random.key(1))
        keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(params))))
        self.params = dict(
            jax.tree.map(
                lambda leaf: leaf if leaf.ndim < 2 else leaf + 0.24 * jax.random.normal(next(keys), leaf.shape),
                dict(params),
            )
        )
        if self.config.walk == "selector":
            self.params |= {name: self.params[name] * 6 for name in ("previous", "next")}
        if self.config.mapped:
            self.params["ids"] = jnp.asarray(IDS)
        self.head = BlockHead(self.config, make_target(TARGET, backend=packed_attention), block_attention)
        self.depth = self.config.drafts_of(BLOCK)

    def examples(self, *lengths: int) -> list[Example]:
        return [Example(self.rng.integers(0, V, n).astype(np.int32), self.rng.random(n) < 0.8) for n in lengths]

    def outputs(self, rows: Rows) -> Teacher:
        """Functions of an example's number of tokens and a token's position, so that packing does not matter."""
        sizes = np.stack([np.bincount(row, minlength=99)[row] for row in np.asarray(rows.segments)])
        seeds = (sizes * 100 + np.asarray(rows.positions)).ravel()
        draws = [np.random.default_rng(seed) for seed in seeds]
        shape = rows.tokens.shape
        return Teacher(
            jnp.asarray([draw.normal(size=2 * M) for draw in draws], jnp.float32).reshape(*shape, -1),
            jnp.asarray([draw.normal(0, 3, M) for draw in draws], jnp.float32).reshape(*shape, -1),
            jnp.asarray([draw.integers(0, V) for draw in draws], jnp.int32).reshape(shape),
        )

    def logits(self, batch: Rows, features: jax.Array, slots: Any) -> tuple[jax.Array, jax.Array]:
        """Logits after the text of the blocks at these slots, [n, D, W or c], and the target's ids of their tokens."""
        return text_logits(self.head, self.params, self.target_params, batch, features, slots)

    def loss(self, objective: BlockObjective) -> Any:
        """The compiled loss of a batch, its teacher and a key."""

        @jax.jit
        def loss(batch: Rows, teacher: Teacher, key: Any) -> Any:
            return block_loss(
                self.head, self.target, self.params, self.target_params, batch, teacher, objective, key
            )  # fmt: skip

        return loss

    def propose(self, features: jax.Array, anchor: int):
        """The engine's draft of the whole block after these features [n, F]: a chain."""
        padded = jnp.zeros((1, TEXT, 2 * M)).at[0, : len(features)].set(features)
        params, count = Params(self.target_params, self.params), jnp.asarray([len(features)], jnp.int32)
        tree = proposer(self.config)(params, padded, count, jnp.asarray([anchor], jnp.int32))
        return np.asarray(tree.tokens)[0, 1:], np.asarray(tree.scores)[0, 1:]


@functools.cache
def proposer(config: BlockConfig) -> Any:
    """The compiled `propose` of a new request after features [1, TEXT, F], of which `count` are the prompt's."""
    depth, pool = config.drafts_of(BLOCK), PoolShape(8, 4)
    drafter = block_drafter(make_target(TARGET), config, TreeShape(depth, 1, depth + 1), block=BLOCK)

    @jax.jit
    def propose(params: Params, features: Any, count: Any, anchor: Any) -> Any:
        def context(prefix: Any) -> Context:
            sampling = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], sampling_row(V))
            return Context(
                slots=jnp.zeros(1, jnp.int32), prefix_length=prefix, page_table=jnp.arange(8, dtype=jnp.int32)[None],
                root=anchor, active=jnp.ones(1, bool), salt=jnp.zeros(1, jnp.uint32), sampling=sampling,
            )  # fmt: skip

        tokens = jnp.zeros((1, TEXT), jnp.int32)
        seen = Observation(tokens, tokens, features, count)
        state = drafter.observe(params, drafter.init(params, 1, pool), context(jnp.zeros(1, jnp.int32)), seen)
        return drafter.propose(params, state, context(count))[0]

    return propose


def text_logits(head: BlockHead, params: Any, target_params: Any, batch: Rows, features: jax.Array, slots: Any) -> Any:
    """See `World.logits`."""
    label = jnp.zeros((np.size(slots), head.config.drafts_of(head.config.block)), jnp.int32)
    found, logits = block_logits(head, params, target_params, batch, features, jnp.asarray(slots), label)
    ids = params["ids"] if head.config.mapped else jnp.arange(V)
    if found.candidates is None:
        return logits, jnp.broadcast_to(ids, logits.shape)
    return logits[:, :, :-1], ids[found.candidates.ids[:, :, :-1]]


@pytest.mark.parametrize("name", list(HEADS))
def test_packed_rows_equal_propose(name):
    """At the first positions of an example and later, in the first example of a row and in the second. The text after
    an anchor is the draft, since a walk reads it."""
    world = World(name)
    rows = pack(world.examples(14, 12), 28, 0)
    teacher = world.outputs(rows)
    boundary = int(np.argmax(rows.segments[0] == 2))
    slots = np.array([[1, 2, 9, boundary + 1, boundary + 2, boundary + 7]], np.int32)
    tokens, expected = rows.tokens.copy(), []
    for slot in slots[0]:
        first = slot - rows.positions[0, slot]
        expected.append(world.propose(teacher.features[0, first:slot], int(tokens[0, slot])))
    logits, of_text = [], jax.jit(lambda batch: world.logits(batch, teacher.features, slots))
    for place, (drafts, _) in enumerate(expected):  # blocks of 4 may overlap, so one at a time
        text, slot = tokens.copy(), slots[0, place]
        text[0, slot + 1 : slot + 1 + world.depth] = drafts
        found, ids = map(np.asarray, of_text(jax.tree.map(jnp.asarray, rows._replace(tokens=text))))
        logits.append([found[place], ids[place]])
    for (drafts, scores), (found, ids) in zip(expected, logits, strict=True):
        best = found.argmax(axis=1)[:, None]
        np.testing.assert_array_equal(np.take_along_axis(ids, best, axis=1)[:, 0], drafts)
        log_probs = np.asarray(jax.nn.log_softmax(found)).max(axis=1)
        np.testing.assert_allclose(np.cumsum(log_probs), scores, rtol=2e-4, atol=2e-5)
    if world.config.walk == "selector":  # whose choice is not always the first candidate
        assert any(found.argmax(axis=1).any() for found, _ in logits)


@pytest.mark.parametrize(
    ("name", "algorithm"), [("mapped", "DFLASH"), ("dspark", "DSPARK"), ("dflash2 mapped", "DFLASH2")]
)
def test_examples_of_a_row_do_not_meet(name, algorithm):
    """Loss and sums over all anchors equal the sum over rows of one example each."""
    world = World(name)
    examples = world.examples(11, 7, 5, 2)

    loss = world.loss(BLOCKS[algorithm]._replace(anchors=27))

    def losses(examples: list[Example]) -> list[np.ndarray]:
        rows = pack(examples, 27, 0)
        total, sums = loss(jax.tree.map(jnp.asarray, rows), world.outputs(rows), jax.random.key(0))
        return [np.asarray(part) for part in (total, *sums)]

    packed, alone = losses(examples), [losses([example]) for example in examples]
    assert packed[-1][0] > 10, "anchors"
    for whole, *parts in zip(packed, *alone, strict=True):
        np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=2e-5)


@pytest.mark.parametrize("name", ["mapped", "dflash2 mapped"])
def test_sums_equal_a_loop(name):
    """Loss, `matched`, `counted` and `slots` by the words of their descriptions, slot by slot."""
    world = World(name)
    rows = pack(world.examples(13, 9), 24, 0)
    teacher, length = world.outputs(rows), 24
    batch = jax.tree.map(jnp.asarray, rows)
    # Labels that are often right, so that later slots are reached.
    every = jnp.arange(length, dtype=jnp.int32)[None]
    logits, ids = map(np.asarray, jax.jit(world.logits)(batch, teacher.features, every))
    drafts = np.take_along_axis(ids, logits.argmax(axis=-1)[:, :, None], axis=2)[:, :, 0]
    tokens, top = rows.tokens.copy(), world.rng.integers(0, V, (1, length))
    for slot in range(0, length - 1, 2):
        tokens[0, slot + 1] = drafts[slot, 0]
        top[0, slot : slot + 2] = drafts[slot, :2]
    batch = batch._replace(tokens=jnp.asarray(tokens))
    teacher = teacher._replace(top=jnp.asarray(top, jnp.int32))
    index = {int(token): i for i, token in enumerate(IDS)}
    after = np.pad(tokens[0], (0, BLOCK))[np.arange(length)[:, None] + 1 + np.arange(world.depth)]
    labels = np.array([[index.get(int(token), -1) for token in block] for block in after], np.int32)
    found, walked = jax.jit(functools.partial(block_logits, world.head))(
        world.params, world.target_params, batch, teacher.features, every, jnp.asarray(labels)
    )
    log_probs, walked = np.asarray(jax.nn.log_softmax(found.logits)), np.asarray(walked)
    total, sums, missing = 0.0, np.zeros((4, world.depth)), 0
    for slot in range(length):
        counts = 0
        while slot + counts < min(length, slot + BLOCK) and rows.loss[0, slot + counts]:
            if rows.segments[0, slot + counts] != rows.segments[0, slot]:
                break
            counts += 1
        if counts < 2:
            continue
        entropy, choice, counted, reached = *np.zeros((3, world.depth)), True
        for j, label in enumerate(labels[slot, : counts - 1]):
            counted[j] = label >= 0
            entropy[j] = -log_probs[slot, j, label]
            draft = walked[slot, j].argmax()
            if found.candidates is not None:
                *candidates, own = np.asarray(found.candidates.ids)[slot, j].tolist()
                scores = walked[slot, j]
                draft = candidates[scores[:-1].argmax()]
                assert own == max(label, 0)
                if label >= 0 and label not in candidates:
                    missing, candidates, scores = missing + 1, [*candidates[:-1], own], np.delete(scores, -2)
                kept = scores[: len(candidates)]
                choice[j] = np.log(np.exp(kept).sum()) - kept[candidates.index(label)] if label >= 0 else 9.0
            sums[1, j] += reached and int(IDS[draft]) == top[0, slot + j]
            sums[3, j] += reached
            reached = reached and draft == label
        total += (loop_d_pace(entropy, counted, 0.5) * entropy).sum()
        total += (loop_d_pace(choice, counted, 0.5) * choice).sum() if found.candidates is not None else 0.0
        sums[0] += counted * (entropy + choice)
        sums[2] += counted
    actual, parts = world.loss(BlockObjective(anchors=length))(batch, teacher, jax.random.key(2))
    assert sums[1, 1] > 0 and sums[3, 0] > sums[1, 0] and sums[2, 0] < sums[3, 0]
    assert (missing > 3) == (found.candidates is not None)
    np.testing.assert_allclose(actual, total, rtol=1e-5)
    np.testing.assert_allclose(np.stack(parts), sums, rtol=1e-5)


def loop_d_pace(entropy: np.ndarray, counted: np.ndarray, alpha: float) -> np.ndarray:
    weights = np.zeros(len(entropy))
    for j in range(len(entropy)):
        for m in range(j, len(entropy)):
            product = 1.0
            for i in range(m + 1):
                product *= (1 - alpha) * (np.exp(-entropy[i]) if counted[i] else 0) + alpha
            weights[j] += product * counted[m] * counted[j]
    return weights


def test_anchors():
    """Different slots with a loss before another one, in each example its share, and new ones for each key."""
    rng = np.random.default_rng(0)
    examples = [Example(np.zeros(n, np.int32), rng.random(n) < 0.7) for n in (40, 30, 20, 9, 2, 50, 41, 5)]
    rows = pack(examples, 100, 0)
    batch, counts = jax.tree.map(jnp.asarray, rows), np.zeros(rows.tokens.shape)
    usable = rows.loss[:, :-1] & rows.loss[:, 1:] & (rows.segments[:, :-1] == rows.segments[:, 1:])
    for count in (12, 99):
        for seed in range(60):
            slots, used = map(np.asarray, draw_anchors(batch, count, jax.random.key(seed)))
            for row, (places, kept) in enumerate(zip(slots, used, strict=True)):
                chosen = places[kept]
                assert len({*chosen}) == len(chosen) == min(count, usable[row].sum())
                assert usable[row, chosen].all()
                counts[row, chosen] += count == 12
                for segment in range(1, rows.segments[row].max() + 1):
                    part = (usable[row] & (rows.segments[row, :-1] == segment)).sum()
                    share = len(chosen) * part / usable[row].sum()
                    assert abs((rows.segments[row, chosen] == segment).sum() - share) < 1 + 1e-6
    for row, drawn in enumerate(counts[:, :-1]):
        expected = 60 * 12 / usable[row].sum()
        assert (drawn[usable[row]] > 0).all() and drawn.max() < 2.5 * expected


@pytest.mark.parametrize("name", list(HEADS))
def test_init_from(name, tmp_path):
    """The exported head is read with equal configuration and parameters; flags that differ are refused."""
    world, folder = World(name), str(tmp_path / "head")
    export_head(folder, world.config, world.params, TARGET, target_name="t", card="", dtype="float32")
    walk = world.config.walk
    algorithm, other = {"none": ("DFLASH", ""), "selector": ("DFLASH2", "DSPARK")}.get(walk, ("DSPARK", "DFLASH2"))
    settings = DraftSettings(draft=algorithm, init_from=folder)
    config, params = from_head(settings, TARGET, BlockSettings(block_size=BLOCK, mask_token=V - 1))
    assert config == world.config
    jax.tree.map(np.testing.assert_array_equal, params, world.params)
    for changes, expected in (
        ({"mask_token": 0}, f"--mask-token 0 differs from --init-from .*, {V - 1}"),
        ({"draft_layers": 3}, "--draft-layers 3 differs from --init-from .*, 2; leave it out"),
    ):
        with pytest.raises(ValueError, match=expected):
            from_head(settings, TARGET, BlockSettings(**changes))
    for draft in (other, "DFLASH") if other else ():
        with pytest.raises(ValueError, match=f"has the walk {walk}, not one of {draft}"):
            from_head(replace(settings, draft=draft), TARGET, BlockSettings())


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH2"])
def test_init_from_a_dflash_head(algorithm, tmp_path):
    """A head with a walk starts from a DFLASH head: it has its weights, and a new DFLASH2 head its outputs."""
    world, folder = World("mapped"), str(tmp_path / "head")
    export_head(folder, world.config, world.params, TARGET, target_name="t", card="", dtype="float32")
    config, params = from_head(DraftSettings(draft=algorithm, init_from=folder), TARGET, BlockSettings(walk_rank=6))
    assert config == replace(world.config, **NEW_WALKS[algorithm]) and params["previous"].shape == (V, 6)
    layer = params["layers_1"]
    jax.tree.map(
        np.testing.assert_array_equal,
        {name: layer[name] for name in world.params["layers_1"]},
        world.params["layers_1"],
    )
    np.testing.assert_array_equal(params["head"], world.params["head"])
    features = jnp.asarray(world.rng.normal(size=(5, 2 * M)), jnp.float32)
    before, _ = world.propose(features, 4)
    zero = {"next": jnp.zeros_like(params["next"])}
    world.config, world.params = config, params | zero
    np.testing.assert_array_equal(world.propose(features, 4)[0], before)


BLOCK_FLAGS: dict[str, Any] = {
    "draft": "DFLASH", "rounds": None, "block_size": BLOCK, "draft_layers": 1, "aux_layers": ("1", "2"),
    "mask_token": 3, "anchors": 64, "draft_vocab_size": 30, "measure_prompts": 3, "measure_tokens": 10,
    "measure_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(model, tmp_path_factory) -> Path:
    """Greedy answers of the target."""
    rng, file = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "data.jsonl"
    prompts = [rng.integers(4, VOCABULARY, 6).tolist() for _ in range(16)]
    engine = Engine.from_pretrained(str(model), draft="NONE", dtype="float32")
    written = engine.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True))
    rows = [
        {"prompt_ids": prompt, "response_ids": done.output_ids} for prompt, done in zip(prompts, written, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def train(model: Path, data: Path, output: Path, capfd, **changes: Any):
    status = main(arguments(model, data, output, **BLOCK_FLAGS | changes))
    printed = capfd.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out.splitlines()[-1])


@pytest.mark.parametrize(
    "algorithm", ["DFLASH", *(pytest.param(algorithm, marks=pytest.mark.slow) for algorithm in NEW_WALKS)]
)
def test_a_whole_run(model, answers, tmp_path, capfd, algorithm):
    """Loss falls, and the exported head drafts as simulated."""
    flags = {"draft": algorithm, "steps": 40, "checkpoint_every": 40, "log_every": 5, "export_dtype": "float32"}
    if algorithm != "DFLASH":
        flags |= {"walk_rank": 8}
    summary = train(model, answers, tmp_path / "run", capfd, **flags)
    rows = [row for row in read_metrics(tmp_path / "run") if "losses" in row]
    # The target's distribution, which DSPARK learns, is nearly flat.
    assert rows[-1]["losses"][0] < (0.7 if algorithm == "DFLASH" else 0.9) * rows[0]["losses"][0]
    assert rows[-1]["simulated"] == pytest.approx(1 + np.cumprod(rows[-1]["matched"]).sum(), abs=1e-3)
    assert len(rows[-1]["matched"]) == BLOCK - 1
    if algorithm == "DFLASH":
        assert rows[-1]["simulated"] > 1.3
        assert 1.0 <= summary["accept_length"] <= BLOCK and len(summary["by_depth"]) <= BLOCK - 1

    head = tmp_path / "run" / "head"
    drafts = Block(str(head), steps=BLOCK - 1, topk=1, nodes=BLOCK)
    engine = Engine.from_pretrained(str(model), draft=drafts, dtype="float32")
    texts = [json.loads(line) for line in answers.read_text().splitlines()]
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    written = engine.generate([text["prompt_ids"] for text in texts], sampling)
    histogram = np.sum([done.spec_accept_histogram for done in written], axis=0)
    assert histogram[1:].sum() > (0 if algorithm == "DSPARK" else 0.1 * histogram.sum())
    tokens = [np.array(text["prompt_ids"] + text["response_ids"], np.int32) for text in texts]
    examples = [Example(each, np.arange(len(each)) >= 6) for each in tokens]
    rows, drafts = drafts_after_text(model, head, examples)
    np.testing.assert_array_equal(histogram, simulated_histogram(rows, drafts))
    measured = next(row for row in reversed(read_metrics(tmp_path / "run")) if "accept_length" in row)
    assert measured["simulated"] == pytest.approx(1 + np.cumprod(measured["simulated_by_depth"]).sum(), abs=1e-3)


def drafts_after_text(model: Path, head: Path, examples: list[Example]) -> tuple[Rows, np.ndarray]:
    """Packed rows, and the drafts [rows, N, D] of blocks at all slots."""
    files = checkpoint.resolve(str(model))
    config = checkpoint.model_config(files.config, dtype="float32")
    params = checkpoint.load_params(files, config, quantization="none", progress=False)
    described, weights = checkpoint.load_head(str(head), config, kind="block", progress=False)
    assert isinstance(described, BlockConfig)
    target = training_target(config, "float32")
    rows = pack(examples, 64, 0)
    batch = jax.tree.map(jnp.asarray, rows)
    teacher = jax.jit(teach(target, described.features))(params, batch)
    slots = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None], rows.tokens.shape)
    block_head = BlockHead(described, target, block_attention)
    of_text = jax.jit(functools.partial(text_logits, block_head))
    logits, ids = map(np.asarray, of_text(weights, params, batch, teacher.features, slots))
    drafts = np.take_along_axis(ids, logits.argmax(axis=-1)[:, :, None], axis=2)
    return rows, drafts.reshape(*rows.tokens.shape, -1)


def simulated_histogram(rows: Rows, drafts: np.ndarray) -> np.ndarray:
    """Steps by accepted drafts, if the texts were decoded with these drafts."""
    histogram = np.zeros(BLOCK, int)
    for row, segments in enumerate(rows.segments):
        for segment in range(1, segments.max() + 1):
            answer = np.flatnonzero((segments == segment) & rows.loss[row])
            anchor, last = answer[0], answer[-1]
            while anchor < last:
                following = rows.tokens[row, anchor + 1 : min(anchor + BLOCK, last + 1)]
                agreed = np.cumprod(drafts[row, anchor, : len(following)] == following).sum()
                accepted = min(agreed, last - anchor - 1)  # a step emits the target's own token, too
                histogram[accepted] += 1
                anchor += accepted + 1
    return histogram
