"""Training of block heads: packed rows against serving, anchors, weights, and runs whose heads draft in the engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import VOCABULARY
from train_helpers import arguments, save_model

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
from specjax.train.block import BLOCKS, BlockObjective, block_attention, block_logits, block_loss, d_pace, draw_anchors
from specjax.train.data import Example, Rows, pack
from specjax.train.export import export_head
from specjax.train.features import teach, training_target
from specjax.train.head import from_head
from specjax.train.options import BlockSettings, DraftSettings
from specjax.train.output import read_metrics
from specjax.train.unroll import Teacher, packed_attention

V, M, W, BLOCK = 19, 16, 9, 4
TARGET = ModelConfig("llama", V, M, 24, 4, 4, 2, 8, 1e-5, RopeConfig(theta=500.0), 64, tied_embeddings=True)
PLAIN = BlockConfig(
    hidden_size=M, feature_size=2 * M, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, norm_epsilon=1e-5,
    rope=RopeConfig(theta=700.0), vocab_size=V, aux_layers=(0, 2), layers=2, block=BLOCK, mask_token=V - 1,
    from_anchor=False, windows=(None, None), causal=(False, False),
)  # fmt: skip
MAPPED: dict[str, Any] = {"vocab_size": W, "own_head": True, "mapped": True}
HEADS = {
    "dflash": PLAIN,
    "mapped": replace(PLAIN, **MAPPED),
    "window": replace(PLAIN, windows=(3, None), causal=(True, False)),
    "from anchor": replace(PLAIN, from_anchor=True),
    "dspark": replace(PLAIN, walk="vanilla", rank=5, **MAPPED),
    "rnn": replace(PLAIN, walk="rnn", rank=5),
}
IDS = np.array([1, 2, 5, 6, 8, 11, 12, 17, 18], np.int32)


class World:
    """A tiny target, a head with large random weights, and packed rows with random outputs of the target."""

    def __init__(self, name: str, seed: int = 3) -> None:
        self.config, self.rng = HEADS[name], np.random.default_rng(seed)
        self.target, self.target_params = make_target(TARGET), init_params(TARGET, jax.random.key(0))
        params = init_head_params(self.config, self.target, jax.random.key(1))
        self.params = dict(jax.tree.map(lambda leaf: leaf if leaf.ndim < 2 else leaf * 12, dict(params)))
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

    def propose(self, features: jax.Array, anchor: int):
        """The engine's draft of the whole block after these features [n, F]: a chain."""
        drafter = block_drafter(self.target, self.config, TreeShape(self.depth, 1, self.depth + 1), block=BLOCK)
        params, pool, count = Params(self.target_params, self.params), PoolShape(8, 4), len(features)

        def context(prefix: int) -> Context:
            sampling = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], sampling_row(V))
            one = jnp.zeros(1, jnp.int32)
            return Context(
                slots=one, prefix_length=one + prefix, page_table=jnp.arange(8, dtype=jnp.int32)[None],
                root=one + anchor, active=jnp.ones(1, bool), salt=jnp.zeros(1, jnp.uint32), sampling=sampling,
            )  # fmt: skip

        tokens = jnp.zeros((1, count), jnp.int32)
        seen = Observation(tokens, tokens, features[None], jnp.full(1, count, jnp.int32))
        state = drafter.observe(params, drafter.init(params, 1, pool), context(0), seen)
        tree, _ = drafter.propose(params, state, context(count))
        return np.asarray(tree.tokens)[0, 1:], np.asarray(tree.scores)[0, 1:]


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
    logits = []
    for place, (drafts, _) in enumerate(expected):  # blocks of 4 may overlap, so one at a time
        text, slot = tokens.copy(), slots[0, place]
        text[0, slot + 1 : slot + 1 + world.depth] = drafts
        batch = jax.tree.map(jnp.asarray, rows._replace(tokens=text))
        found = block_logits(world.head, world.params, world.target_params, batch, teacher.features, jnp.asarray(slots))
        logits.append(np.asarray(found)[place])
    for (drafts, scores), found in zip(expected, logits, strict=True):
        best = found.argmax(axis=1)
        np.testing.assert_array_equal(IDS[best] if world.config.mapped else best, drafts)
        log_probs = np.asarray(jax.nn.log_softmax(found)).max(axis=1)
        np.testing.assert_allclose(np.cumsum(log_probs), scores, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["mapped", "dspark"])
@pytest.mark.parametrize("algorithm", list(BLOCKS))
def test_examples_of_a_row_do_not_meet(name, algorithm):
    """Loss and sums over all anchors equal the sum over rows of one example each."""
    world = World(name)
    examples = world.examples(11, 7, 5, 2)

    def losses(examples: list[Example], length: int) -> list[np.ndarray]:
        rows = pack(examples, length, 0)
        batch = jax.tree.map(jnp.asarray, rows)
        total, sums = block_loss(
            world.head, world.target, world.params, world.target_params, batch, world.outputs(rows),
            BLOCKS[algorithm]._replace(anchors=length), jax.random.key(0),
        )  # fmt: skip
        return [np.asarray(part) for part in (total, *sums)]

    packed, alone = losses(examples, 27), [losses([example], 27) for example in examples]
    assert packed[-1][0] > 10, "anchors"
    for whole, *parts in zip(packed, *alone, strict=True):
        np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=2e-5)


def test_sums_equal_a_loop():
    """Loss, `matched`, `counted` and `slots` by the words of their descriptions, slot by slot."""
    world = World("mapped")
    rows = pack(world.examples(13, 9), 24, 0)
    teacher, length = world.outputs(rows), 24
    batch = jax.tree.map(jnp.asarray, rows)
    # Labels that are often right, so that later slots are reached.
    every = jnp.arange(length, dtype=jnp.int32)[None]
    logits = np.asarray(block_logits(world.head, world.params, world.target_params, batch, teacher.features, every))
    tokens, top = rows.tokens.copy(), world.rng.integers(0, V, (1, length))
    for slot in range(0, length - 1, 2):
        tokens[0, slot + 1] = IDS[logits[slot, 0].argmax()]
        top[0, slot : slot + 2] = IDS[logits[slot, :2].argmax(axis=1)]
    batch = batch._replace(tokens=jnp.asarray(tokens))
    teacher = teacher._replace(top=jnp.asarray(top, jnp.int32))
    logits = np.asarray(block_logits(world.head, world.params, world.target_params, batch, teacher.features, every))
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    index = {int(token): i for i, token in enumerate(IDS)}
    total, sums = 0.0, np.zeros((4, world.depth))
    for slot in range(length):
        labels = []
        for other in range(slot, min(slot + BLOCK, length)):
            if not rows.loss[0, other] or rows.segments[0, other] != rows.segments[0, slot]:
                break
            labels.append(int(tokens[0, other]))
        if len(labels) < 2:
            continue
        entropy, counted, reached = np.zeros(world.depth), np.zeros(world.depth), True
        for j, label in enumerate(labels[1:]):
            counted[j] = label in index
            entropy[j] = -log_probs[slot, j, index[label]] if label in index else 9.0
            draft = int(IDS[logits[slot, j].argmax()])
            sums[1, j] += reached and draft == top[0, slot + j]
            sums[3, j] += reached
            reached = reached and draft == label
        total += (loop_d_pace(entropy, counted, 0.5) * entropy).sum()
        sums[0] += counted * entropy
        sums[2] += counted
    actual, parts = block_loss(
        world.head, world.target, world.params, world.target_params, batch, teacher, BlockObjective(anchors=length),
        jax.random.key(2),
    )  # fmt: skip
    assert sums[1, 1] > 0 and sums[3, 0] > sums[1, 0] and sums[2, 0] < sums[3, 0]
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


def test_d_pace():
    rng = np.random.default_rng(0)
    entropy, counted = rng.exponential(1, (40, 7)).astype(np.float32), (rng.random((40, 7)) < 0.7).astype(np.float32)
    for alpha in (0.5, 0.1):
        expected = [loop_d_pace(row, mask, alpha) for row, mask in zip(entropy, counted, strict=True)]
        np.testing.assert_allclose(d_pace(jnp.asarray(entropy), jnp.asarray(counted), alpha), expected, rtol=2e-5)
    certain = d_pace(jnp.zeros((1, 7)), jnp.ones((1, 7)))
    np.testing.assert_allclose(certain[0], np.arange(7, 0, -1), rtol=1e-6)


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
    settings = DraftSettings(draft="DFLASH" if world.config.walk == "none" else "DSPARK", init_from=folder)
    config, params = from_head(settings, TARGET, BlockSettings(block_size=BLOCK, mask_token=V - 1))
    assert config == world.config
    jax.tree.map(np.testing.assert_array_equal, params, world.params)
    for changes, expected in (
        ({"mask_token": 0}, f"--mask-token 0 differs from --init-from .*, {V - 1}"),
        ({"draft_layers": 3}, "--draft-layers 3 differs from --init-from .*, 2; leave it out"),
    ):
        with pytest.raises(ValueError, match=expected):
            from_head(settings, TARGET, BlockSettings(**changes))
    other = replace(settings, draft="DSPARK" if world.config.walk == "none" else "DFLASH")
    with pytest.raises(ValueError, match=f"has the walk {world.config.walk}, not one of {other.draft}"):
        from_head(other, TARGET, BlockSettings())


BLOCK_FLAGS: dict[str, Any] = {
    "draft": "DFLASH", "rounds": None, "block_size": BLOCK, "draft_layers": 1, "aux_layers": ("1", "2"),
    "mask_token": 3, "anchors": 24, "draft_vocab_size": 30, "measure_prompts": 3, "measure_tokens": 10,
    "measure_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("target") / "model")


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


@pytest.mark.parametrize("algorithm", ["DFLASH", pytest.param("DSPARK", marks=pytest.mark.slow)])
def test_a_whole_run(model, answers, tmp_path, capfd, algorithm):
    """Loss falls, a run resumes bit for bit, and the exported head drafts as simulated, without changing the text."""
    flags = {"draft": algorithm, "steps": 40, "checkpoint_every": 20, "log_every": 5, "export_dtype": "float32"}
    if algorithm == "DSPARK":
        flags |= {"markov_rank": 8, "measure_prompts": 0}
    summary = train(model, answers, tmp_path / "run", capfd, **flags)
    rows = [row for row in read_metrics(tmp_path / "run") if "losses" in row]
    # The target's distribution, which DSPARK learns, is nearly flat.
    assert rows[-1]["losses"][0] < (0.7 if algorithm == "DFLASH" else 0.9) * rows[0]["losses"][0]
    assert rows[-1]["simulated"] == pytest.approx(1 + np.cumprod(rows[-1]["matched"]).sum(), abs=1e-3)
    assert len(rows[-1]["matched"]) == BLOCK - 1
    if algorithm == "DFLASH":
        assert rows[-1]["simulated"] > 1.3
        assert 1.0 <= summary["accept_length"] <= BLOCK and len(summary["by_depth"]) <= BLOCK - 1
    head = (tmp_path / "run" / "head" / "model.safetensors").read_bytes()

    resumed = shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "40")
    train(model, answers, resumed, capfd, **flags)
    assert (resumed / "head" / "model.safetensors").read_bytes() == head

    drafts = Block(str(resumed / "head"), steps=BLOCK - 1, topk=1, nodes=BLOCK)
    engine = Engine.from_pretrained(str(model), draft=drafts, dtype="float32")
    texts = [json.loads(line) for line in answers.read_text().splitlines()]
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    written = engine.generate([text["prompt_ids"] for text in texts], sampling)
    assert [done.output_ids for done in written] == [text["response_ids"] for text in texts]
    histogram = np.sum([done.spec_accept_histogram for done in written], axis=0)
    expected = simulated_histogram(model, resumed / "head", texts)
    assert expected[1:].sum() > (0.1 * expected.sum() if algorithm == "DFLASH" else 0)
    np.testing.assert_array_equal(histogram, expected)


def simulated_histogram(model: Path, head: Path, texts: list[dict[str, Any]]) -> np.ndarray:
    """Steps by accepted drafts, if the texts were decoded with the drafts of packed rows."""
    files = checkpoint.resolve(str(model))
    config = checkpoint.model_config(files.config, dtype="float32")
    params = checkpoint.load_params(files, config, quantization="none", progress=False)
    described, weights = checkpoint.load_head(str(head), config, kind="block", progress=False)
    assert isinstance(described, BlockConfig)
    target, histogram = training_target(config, "float32"), np.zeros(BLOCK, int)
    block_head = BlockHead(described, target, block_attention)
    tokens = [np.array(text["prompt_ids"] + text["response_ids"], np.int32) for text in texts]
    rows = pack([Example(each, np.ones(len(each), bool)) for each in tokens], 64, 0)
    batch = jax.tree.map(jnp.asarray, rows)
    teacher = jax.jit(teach(target, described.features))(params, batch)
    slots = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None], rows.tokens.shape)
    logits = block_logits(block_head, weights, params, batch, teacher.features, slots)
    best = np.asarray(weights["ids"])[np.asarray(logits).argmax(axis=-1)].reshape(*rows.tokens.shape, -1)
    for row, segments in enumerate(rows.segments):
        for segment in range(1, segments.max() + 1):
            first, end = np.flatnonzero(segments == segment)[[0, -1]] + [0, 1]
            anchor = first + 6  # the first token of the answer
            while anchor + 1 < end:
                following = rows.tokens[row, anchor + 1 : min(anchor + BLOCK, end)]
                agreed = np.cumprod(best[row, anchor, : len(following)] == following).sum()
                accepted = min(agreed, end - anchor - 2)  # a step emits the target's own token, too
                histogram[accepted] += 1
                anchor += accepted + 1
    return histogram


def test_refusals(model, answers, tmp_path, capfd):
    """Settings that do not apply, or have no default, are refused by name."""
    for changes, expected in (
        ({"mask_token": None}, "--mask-token 265 is not one of the model's 265 ids"),
        ({"rounds": 2}, "--loss and --rounds are for --draft EAGLE, EAGLE3, MTP; DFLASH has its own loss"),
        ({"draft": "EAGLE3"}, "the settings of [block] are for --draft DFLASH, DSPARK, not EAGLE3"),
        ({"markov_rank": 4}, "--markov-rank is for --draft DSPARK; DFLASH has no Markov head"),
        ({"measure_steps": 4}, "--measure-steps 4 is more than the 3 tokens that a block drafts"),
        ({"aux_layers": ("3",)}, "--aux-layers must be different layers from 0 to 2, got 3"),
    ):
        assert main(arguments(model, answers, tmp_path / "run", **BLOCK_FLAGS | changes)) == 2
        assert expected in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
