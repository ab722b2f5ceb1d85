"""STANDALONE: the trees that a whole model drafts, its cache, its vocabulary, and that no text changes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from eagle_oracle import grow_tree, log_softmax
from engine_helpers import MERGES, SPECIAL, VOCABULARY, check_idle, check_plain, make_engine, outcome, tokenizer
from oracle import Sampling
from tiny_checkpoints import save_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_models import Runner, Toy, tiny_llama
from transformers import PreTrainedTokenizerFast

from specjax.cache import bytes_per_token
from specjax.checkpoint import CheckpointError, match_vocabularies
from specjax.cli import build, flags
from specjax.drafters import Drafter, NoDraft, Params, Standalone, StandaloneParams, TreeShape
from specjax.drafters.factories import make_drafter
from specjax.drafters.standalone import standalone_drafter
from specjax.drafters.table import options_of
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.engine.buckets import Buckets
from specjax.engine.sequence import Status
from specjax.step import StepConfig
from specjax.tree import DraftTree

ERROR = 1e-4
"""In scores. Where the oracle's own gap is below, a tree may differ."""
CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(3, 3, 8)


@functools.cache
def target() -> Toy:
    return tiny_llama(3)


@functools.cache
def noisy(scale: float = 0.05) -> Toy:
    """The target with noise in its weights, which is right often, but not always."""
    rng = np.random.default_rng(1)

    def moved(leaf):
        return jnp.asarray(np.asarray(leaf) + rng.normal(0, scale, leaf.shape).astype(np.float32))

    return target()._replace(params=jax.tree.map(moved, target().params))


# The drafts.


class Vocabulary:
    """The other model's ids are shuffled; it has rows without tokens, tokens of its own, and lacks some of the
    target's, which it reads as other tokens."""

    size = 37
    common = 25

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        rows = rng.permutation(self.size)[: self.common]
        self.ids = np.full(self.size, -1, np.int32)
        self.ids[rows] = rng.permutation(target().vocab)[: self.common]
        self.reads = rng.integers(0, self.size, target().vocab).astype(np.int32)
        self.reads[self.ids[rows]] = rows


@functools.cache
def other() -> Toy:
    """Another architecture, vocabulary and number of positions."""
    return tiny_llama(8, vocab_size=Vocabulary.size, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
                      max_positions=15)  # fmt: skip


def paths(found: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """Path below the root -> score."""
    each: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, int(np.sum(found.valid[row]))):
        each[node] = (*each[int(found.parents[row, node])], int(found.tokens[row, node]))
    return {path: float(found.scores[row, node]) for node, path in each.items() if node > 0}


CASES = {"chain": (CHAIN, False), "tree, other vocabulary": (TREE, True)}


@pytest.mark.parametrize("case", CASES)
def test_the_step_drafts_the_oracles_trees(case):
    """Tokens, positions, masks and commits: the trees of six steps, each computed from the text alone; none where a
    tree would reach beyond the draft's positions. Then the cache is that of the text."""
    shape, is_other = CASES[case]
    drafts, vocabulary = (other(), Vocabulary()) if is_other else (noisy(), None)
    limit = drafts.target.config.max_positions
    ids = np.arange(drafts.vocab) if vocabulary is None else vocabulary.ids
    reads = np.arange(target().vocab) if vocabulary is None else vocabulary.reads
    given = StandaloneParams(drafts.params, *((jnp.asarray(ids), jnp.asarray(reads)) if vocabulary else ()))
    logits = drafts.logits
    if not is_other:
        on_host = jax.tree.map(np.asarray, drafts.params)
        logits = functools.cache(lambda tokens: oracle.llama_logits(on_host, drafts.target.config, tokens)[-1])

    def log_probs(request: Sampling, text: list[int], path: tuple[int, ...]) -> np.ndarray:
        """With the noise that the target's draw of the next token has, token by token of the target's."""
        raw = logits(tuple(int(reads[token]) for token in (*text, *path)))
        noise = oracle.noise(request.seed, len(text) + len(path), target().vocab)[ids]
        return log_softmax(np.where(ids >= 0, raw + request.temperature * noise, -np.inf))

    drafter = standalone_drafter(target().target, drafts.target, shape)
    config = StepConfig(widths=(drafter.width,), trace=True)
    runner = Runner(target(), drafter, rows=2, draft=given, config=config, page_size=3)
    requests = [([4, 8, 15, 16, 23], Sampling(max_tokens=20)), ([7], Sampling(max_tokens=20, temperature=1.0, seed=1))]
    for slot, (prompt, request) in enumerate(requests):
        runner.admit(slot, prompt, request)
    first = runner.prefill([prompt for prompt, _ in requests], chunk=2)
    texts = [[*prompt, int(first.tokens[row, 0])] for row, (prompt, _) in enumerate(requests)]
    clear, beyond = 0, 0
    for _ in range(9 if is_other else 5):
        before = [list(text) for text in texts]
        output = runner.step([True, True])
        for row, text in enumerate(before):
            ours = paths(output.trace.tree, row)
            expected = grow_tree(
                functools.partial(log_probs, requests[row][1], text), text[-1], shape.steps, shape.topk, shape.nodes,
                target_ids=ids,
            )  # fmt: skip
            if len(text) - 1 + shape.steps > limit:
                assert not ours
                beyond += 1
            elif expected.gap > ERROR:
                wanted = {expected.path(node): expected.scores[node] for node in range(1, expected.size)}
                assert ours.keys() == wanted.keys()
                np.testing.assert_allclose([ours[path] for path in wanted], list(wanted.values()), atol=ERROR)
                clear += 1
            texts[row] += output.tokens[row, : output.emitted[row]].tolist()
    assert clear >= 6 and bool(beyond) == is_other
    assert is_other or max(map(len, texts)) > 10, "some drafts were accepted"
    for row, text in enumerate(texts):
        check_cache(runner.state.draft, runner.table[row], row, from_scratch(drafter, given, text), len(text) - 1)


# The cache.


LONGEST = 96


class Kept:
    """What the draft keeps of a text: all leaves of its n slots [n, X], of its root [X], and its output there."""

    def __init__(self, draft: Any, table: np.ndarray, row: int, count: int) -> None:
        def flat(leaf):
            return np.asarray(leaf)[table].reshape(-1, *leaf.shape[2:])[:count].reshape(count, -1)

        self.slots = np.concatenate([flat(leaf) for leaf in jax.tree.leaves(draft.cache)], axis=1)
        self.root = np.concatenate([np.asarray(leaf)[row].ravel() for leaf in jax.tree.leaves(draft.root)])
        self.hidden = np.asarray(draft.hidden[row])


@functools.cache
def fresh_runner(drafter: Drafter) -> Runner:
    return Runner(target(), drafter, rows=1, pages_a_row=LONGEST, page_size=1, chunk=LONGEST)


def from_scratch(drafter: Drafter, given: StandaloneParams, text: list[int]) -> Kept:
    """All but the last token of the text committed, in one prefill of one chunk."""
    runner = fresh_runner(drafter)
    runner.params = Params(target().params, given)
    runner.admit(0, text[:-1], Sampling(max_tokens=4))
    runner.prefill([text[:-1]], forced=text[-1])
    return Kept(runner.state.draft, runner.table[0], 0, len(text) - 1)


def check_cache(draft: Any, table: np.ndarray, row: int, expected: Kept, count: int) -> None:
    found = Kept(draft, table, row, count)
    for name in ("slots", "root", "hidden"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=2e-5, err_msg=name)


@functools.cache
def drafting(shape: TreeShape) -> Drafter:
    return standalone_drafter(target().target, noisy().target, shape)


def test_the_cache_after_retractions_aborts_and_requests_without_drafts():
    rng, given = np.random.default_rng(7), StandaloneParams(noisy().params)
    engine = make_engine(
        target(), drafting(TREE), draft=given, max_total_tokens=100, overlap=False, context_length=LONGEST,
        max_running_requests=3,
    )  # fmt: skip
    alive, checked, aborted = {}, 0, 0
    for turn in range(70):
        if turn < 50 and len(alive) < 5 and rng.random() < 0.5:
            prompt = rng.integers(0, 31, int(rng.integers(1, 30))).tolist()
            params = SamplingParams(
                max_new_tokens=int(rng.integers(5, 60)), temperature=float(rng.random() < 0.5), seed=turn,
                speculate=bool(rng.random() < 0.7),
            )  # fmt: skip
            sequence = engine.add(prompt, params)
            alive[sequence.id] = sequence
        if alive and rng.random() < 0.05:
            aborted += engine.abort(str(rng.choice(list(alive))))
        engine.step()
        for sequence in engine.scheduler.active:
            n = int(engine.state.rows.prefix_length[sequence.active_slot.index])
            n = sequence.active_slot.prefilled if sequence.status is Status.PREFILLING else n
            if n and rng.random() < 0.3:
                text = [*sequence.prompt, *sequence.output.tokens][: n + 1]
                expected = from_scratch(drafting(TREE), given, text)
                check_cache(
                    engine.state.draft, np.asarray(sequence.active_slot.pages), sequence.active_slot.index, expected, n
                )
                checked += 1
        alive = {id: s for id, s in alive.items() if s.status is not Status.FINISHED}
        engine.check_integrity()
    while engine.unfinished:
        engine.step()
    assert engine.scheduler.retractions and aborted and checked > 20, (engine.scheduler.retractions, aborted, checked)
    check_idle(engine)


def test_pages_that_are_reused_are_exact():
    """Row 1 begins with two pages of row 0, and goes on otherwise; unlike an EAGLE head's, no slot is stale."""
    shared, given = [3, 1, 4, 1, 5, 9, 2, 6], StandaloneParams(noisy().params)
    first, second = [*shared, 5, 3, 5], [*shared, 8, 8, 9, 7]
    runner = Runner(
        target(), drafting(TREE), rows=2, page_size=4, chunk=3, draft=given, config=StepConfig((TREE.nodes,))
    )
    runner.admit(0, first, Sampling(max_tokens=20))
    runner.prefill([first])
    runner.table[1, :2] = runner.table[0, :2]
    runner.admit(1, second, Sampling(max_tokens=20), prefix_length=len(shared))
    start = runner.prefill([[], second[len(shared) :]])
    text = [*second, int(start.tokens[0, 0])]
    for _ in range(4):
        output = runner.step([False, True])
        text += output.tokens[1, : output.emitted[1]].tolist()
    expected = from_scratch(drafting(TREE), given, text)
    check_cache(runner.state.draft, runner.table[1], 1, expected, len(text) - 1)
    alone = oracle.generate_plain(target().logits, second, Sampling(max_tokens=len(text) - len(second)))
    assert alone.tokens == text[len(second) :]
    # A draft whose numbers are broken leaves the pages, which other requests get later, as they were.
    runner.params = Params(target().params, StandaloneParams(jax.tree.map(lambda leaf: leaf * np.nan, noisy().params)))
    output = runner.step([False, True])
    text += output.tokens[1, : output.emitted[1]].tolist()
    alone = oracle.generate_plain(target().logits, second, Sampling(max_tokens=len(text) - len(second)))
    assert alone.tokens == text[len(second) :]
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(runner.state.draft.cache))


def test_what_a_token_takes_in_the_drafts_cache():
    """Keys and values of two layers with 2 heads of 8, float32: the engine's pool counts them."""
    params = Params(target().params, StandaloneParams(noisy().params))
    assert bytes_per_token(lambda pool: drafting(TREE).init(params, 3, pool), 4) == 2 * 2 * 2 * 8 * 4


# The text.


REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 2, 3], {}),
    ([7] * 20, {"temperature": 1.0, "seed": 3}),
    ([30, 5], {"temperature": 0.7, "seed": -1, "top_k": 9, "frequency_penalty": 0.5}),
    ([10, 11, 10, 11], {"speculate": False}),
    ([1, 2, 3], {"stop_token_ids": [17, 23]}),
]


@pytest.mark.parametrize(
    ("shape", "page_size"),
    [(CHAIN, 1), pytest.param(TREE, 4, marks=pytest.mark.slow), pytest.param(TREE, 16, marks=pytest.mark.slow)],
)
def test_no_text_changes(shape, page_size):
    """Five requests share the batch, in a pool that they do not fit in."""
    engine = make_engine(
        target(), drafting(shape), draft=StandaloneParams(noisy().params), page_size=page_size, max_total_tokens=96,
        context_length=64,
    )  # fmt: skip
    sampling = [SamplingParams(**{"max_new_tokens": 30} | fields) for _, fields in REQUESTS]
    together = engine.generate([prompt for prompt, _ in REQUESTS], sampling)
    for (prompt, _), wanted, found in zip(REQUESTS, sampling, together, strict=True):
        check_plain(target(), prompt, wanted, found)
    assert engine.scheduler.retractions
    assert together[0].spec_accept_length > 1.3 and together[3].spec_accept_length == 1
    check_idle(engine)


def test_a_draft_that_is_the_target_is_always_right():
    runner = Runner(target(), drafting(CHAIN), rows=2, draft=StandaloneParams(target().params), page_size=4)
    requests = [([1, 2, 3], Sampling(max_tokens=25)), ([7] * 9, Sampling(max_tokens=25))]
    found = runner.generate(requests)
    for (prompt, request), result in zip(requests, found, strict=True):
        assert result.tokens == oracle.generate_plain(target().logits, prompt, request).tokens
        assert result.emitted == [CHAIN.depth + 1] * 6


# Vocabularies.


def spelled(words: list[str], merges=(), special=SPECIAL, kind: str = "byte-level") -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    if kind == "byte-level":
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if kind == "SentencePiece":
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[-1])


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@functools.cache
def other_tokenizer() -> PreTrainedTokenizerFast:
    """Other special tokens, bytes in another order, and other merges: `he` in common, and `wor` of its own."""
    words = [*LETTERS[::-1], "he", "wo", "wor", "<s>", "<|im_end|>"]
    return spelled(words, [("h", "e"), ("w", "o"), ("wo", "r")], ("<s>", "<|im_end|>"))


def test_padding_is_no_part_of_a_vocabulary():
    one = tokenizer()
    assert match_vocabularies(one, one, VOCABULARY, VOCABULARY) == (None, None, VOCABULARY)
    assert match_vocabularies(one, one, VOCABULARY + 9, VOCABULARY) == (None, None, VOCABULARY)
    ids, reads, common = match_vocabularies(one, one, VOCABULARY, VOCABULARY + 3, intersection=True)
    np.testing.assert_array_equal(ids, [*range(VOCABULARY), -1, -1, -1])
    assert reads is None and common == VOCABULARY
    padded = spelled([*SPECIAL, *LETTERS, "[PAD259]", "[PAD260]"])
    assert match_vocabularies(spelled([*SPECIAL, *LETTERS]), padded, 262, 262).common == 259


def test_the_first_tokens_that_differ_are_named():
    words = [*SPECIAL, *LETTERS, *(a + b for a, b in MERGES)]
    for changed, message in {
        (*words[:-1], "Ġth"): rf"^its tokenizer is not the target's: id {len(words) - 1} is 'Ġthe' in the target's and "
        "'Ġth' in the draft's$",
        (*words[:-1],): rf"id {len(words) - 1} is 'Ġthe' in the target's and no token in the draft's$",
        (*words, "new"): rf"id {len(words)} is no token in the target's and 'new' in the draft's$",
        (words[1], words[0], *words[2:]): r"id 0 is '<\|endoftext\|>' in the target's and '<\|im_start\|>' in the",
        (*words[3:], *words[:3]): r"id 0 is .*, id 1 is .*, id 2 is .* \(265 ids differ\)$",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            match_vocabularies(tokenizer(), spelled(list(changed)), 265, 265)


def test_the_intersection_of_two_vocabularies():
    ours, theirs = tokenizer().get_vocab(), other_tokenizer().get_vocab()
    ids, reads, common = match_vocabularies(tokenizer(), other_tokenizer(), 270, 265, intersection=True)
    assert ids is not None and reads is not None and common == 256 + 2, "bytes, `he` and <|im_end|>"
    for token, i in theirs.items():
        assert ids[i] == ours.get(token, -1)
        assert token not in ours or reads[ours[token]] == i
    assert (ids[261:] == -1).all()
    assert reads[ours["hell"]] == theirs["l"] and reads[ours["Ġthe"]] == theirs["he"], "the last piece"
    assert reads[ours["<|im_start|>"]] == theirs[">"]
    # Rows that the draft does not have are not read.
    assert match_vocabularies(tokenizer(), other_tokenizer(), 270, 100, intersection=True).reads.max() < 100


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("SentencePiece", "its tokenizer is SentencePiece, the target's byte-level; both must be"),
        ("none", "its tokenizer is of an unknown kind, the target's byte-level"),
    ],
)
def test_tokens_of_another_kind_are_not_compared(kind, message):
    with pytest.raises(CheckpointError, match=message):
        match_vocabularies(tokenizer(), spelled(["a", "b"], kind=kind), 270, 270, intersection=True)
    with pytest.raises(CheckpointError, match="has no token of the target's, special ones aside"):
        match_vocabularies(tokenizer(), spelled([*SPECIAL, "xyz"]), 270, 270, intersection=True)


# As users meet it.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A target; a smaller draft with its tokenizer, padding and fewer positions; and one with another tokenizer."""
    folder = tmp_path_factory.mktemp("standalone")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "initializer_range": 0.3}
    small = sizes | {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    for name, own, size, changes in (
        ("model", tokenizer(), VOCABULARY, sizes),
        ("same", tokenizer(), VOCABULARY + 7, small | {"max_position_embeddings": 64}),
        ("other", other_tokenizer(), 264, small),
    ):
        save_llama(folder / name, **changes, vocab_size=size, eos_token_id=2)
        own.save_pretrained(folder / name)
    return folder


WANTED = [SamplingParams(max_new_tokens=14), SamplingParams(max_new_tokens=14, temperature=1.0, seed=4)]
PROMPTS = ["the hell", "12 and 12"]


@functools.cache
def loaded(folder: str, draft: Any) -> Engine:
    settings = EngineConfig(page_size=4, chunked_prefill_size=16, max_total_tokens=160, max_running_requests=2)
    return Engine.from_pretrained(folder, draft=draft, config=settings, progress=False)


@pytest.mark.parametrize("name", [pytest.param("same", marks=pytest.mark.slow), "other"])
def test_served_from_folders(saved, name, caplog):
    """With the tokens that both have, where the tokenizers differ: the texts are those without drafts."""
    options = Standalone(str(saved / name), vocabulary="same" if name == "same" else "intersection")
    engine, plain = loaded(str(saved / "model"), options), loaded(str(saved / "model"), NoDraft())
    warned = "has 64 positions, texts may have 128 tokens; nothing is drafted beyond" in caplog.text
    assert warned == (name == "same")
    limit = "; within the first 64 tokens of a text" if name == "same" else ""
    assert engine.drafter.note == f"3 steps, top-k 1, 4 draft tokens (automatic){limit}"
    assert engine.drafter.source.endswith("other, whose tokenizer has 258 of the target's tokens") == (name == "other")
    found = [outcome(done) for done in engine.generate(PROMPTS, WANTED)]
    assert found == [outcome(done) for done in plain.generate(PROMPTS, WANTED)]
    # One after the other, so that drafts are made on a CPU, where large batches do not draft.
    assert [outcome(engine.generate(*each)) for each in zip(PROMPTS, WANTED, strict=True)] == found
    assert engine.counters.drafted_steps > 0
    check_idle(engine)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "^--speculative-draft-model-path is missing: STANDALONE needs a draft model$"),
        (
            ("other",),
            "^--speculative-draft-model-path .*other: its tokenizer is not the target's: id 0 is .* in the target's "
            ".*; to draft with the tokens that both have, set the draft's vocabulary to 'intersection'$",
        ),
        (("nowhere",), "^--speculative-draft-model-path .*nowhere"),
    ],
)
def test_what_cannot_draft_is_refused(saved, given, message):
    path = str(saved / given[0]) if given else None
    chosen = flags.Settings(
        model=flags.ModelSettings(model=str(saved / "model")),
        speculative=flags.SpeculativeSettings(speculative_algorithm="STANDALONE", speculative_draft_model_path=path),
    )
    with pytest.raises(ValueError, match=message):
        build.make_engine(chosen, progress=False)


def test_flags_and_options():
    speculative = flags.SpeculativeSettings(
        "STANDALONE", "m", speculative_num_steps=2, speculative_draft_vocabulary="intersection"
    )
    assert build.draft_options(flags.Settings(speculative=speculative)) == Standalone(
        "m", None, 2, vocabulary="intersection"
    )
    assert (Standalone("m").shape(), Standalone("m", topk=2).shape()) == (TreeShape(3, 1, 4), TreeShape(3, 2, 7))
    assert options_of("standalone", path="m") == Standalone("m") and Standalone.kind is None
    with pytest.raises(ValueError, match="STANDALONE needs a target and a draft model; what is missing is model"):
        make_drafter("STANDALONE", target=target().target)
    made = make_drafter(Standalone("m"), target=target().target, model=noisy().target)
    assert (made.name, made.width, made.depth, made.explicit_width) == ("STANDALONE", 4, 3, False)
    buckets = Buckets.build("cpu", made, rows=4, request_pages=4)
    assert buckets.drafts(1) and not buckets.drafts(4), "as with a draft head"
