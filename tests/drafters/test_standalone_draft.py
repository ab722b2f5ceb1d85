"""STANDALONE: the trees that a draft model proposes, its options, and its use from folders."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draft_helpers import noisy
from eagle_oracle import TRACED, DraftTree, check_steps, grow_tree, log_softmax, start
from engine_helpers import LETTERS, VOCABULARY, check_idle, spelled, tokenizer
from oracle import Sampling
from tiny_checkpoints import save_llama
from toy_models import Runner, Toy, tiny_llama

from specjax.cli import build, flags
from specjax.drafters import Standalone, StandaloneParams, TreeShape, options_of
from specjax.drafters.factories import make_speculation
from specjax.drafters.standalone import standalone_drafter
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.engine.plan import Buckets
from specjax.step import StepConfig

CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(3, 3, 8)


@functools.cache
def target() -> Toy:
    return tiny_llama(3)


# The drafts.


ROWS = 37  # of the other draft; the ids 25 to 36 are padding


@functools.cache
def other() -> Toy:
    """Another architecture, with padding and fewer positions."""
    return tiny_llama(8, vocab_size=ROWS, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
                      max_positions=15)  # fmt: skip


CASES = {"chain": (CHAIN, False), "tree, other model": (TREE, True)}


@pytest.mark.parametrize("case", CASES)
def test_trees_of_steps_equal_the_oracle(case):
    """Tokens, positions, masks, commits and coupled noise, each tree from the text alone; no trees that would reach
    beyond the draft's positions."""
    shape, is_other = CASES[case]
    toy = other() if is_other else target()
    params = StandaloneParams(toy.params) if is_other else noisy(toy)
    limit = toy.target.config.max_positions
    ids = np.arange(toy.vocab)
    if is_other:
        ids = np.where(ids < 25, ids, -1)
        params = params._replace(ids=jnp.asarray(ids, jnp.int32))
    on_host = jax.tree.map(np.asarray, params.model)
    logits = functools.cache(lambda tokens: oracle.llama_logits(on_host, toy.target.config, tokens)[-1])

    def log_probs(request: Sampling, text: list[int], path: tuple[int, ...]) -> np.ndarray:
        """With the noise of the target's draw of the next token, by the target's ids."""
        raw = logits((*text, *path))
        noise = oracle.noise(request.seed, len(text) + len(path), target().vocab)[ids]
        return log_softmax(np.where(ids >= 0, raw + request.temperature * noise, -np.inf))

    def expected(row: int, text: list[int]) -> DraftTree | None:
        if len(text) - 1 + shape.steps > limit:
            return None
        of_path = functools.partial(log_probs, TRACED[row][1], text)
        return grow_tree(of_path, text[-1], shape.steps, shape.topk, shape.nodes, target_ids=ids)

    drafter = standalone_drafter(target().target, toy.target, shape)
    config = StepConfig(nodes=drafter.width, trace=True)
    runner = Runner(target(), drafter, rows=2, draft=params, config=config, page_size=3)
    texts = start(runner)
    compared, beyond = check_steps(runner, texts, expected, 9 if is_other else 5)
    assert compared >= 6 and bool(beyond) == is_other
    assert is_other or max(map(len, texts.values())) > 11, "some drafts are accepted"


# From folders, and by flags.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A target; a smaller draft with its tokenizer, padding and fewer positions; and another with another tokenizer."""
    folder = tmp_path_factory.mktemp("standalone")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "initializer_range": 0.3}
    small = sizes | {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    for name, spelling, size, changes in (
        ("model", tokenizer(), VOCABULARY, sizes),
        ("same", tokenizer(), VOCABULARY + 7, small | {"max_position_embeddings": 64}),
        ("other", spelled([*LETTERS[::-1], "<|im_end|>"], ("<|im_end|>",)), 264, small),
    ):
        save_llama(folder / name, **changes, vocab_size=size, eos_token_id=2)
        spelling.save_pretrained(folder / name)
    return folder


def test_served_from_folders(saved):
    """One request at a time, because large batches do not draft on a CPU."""
    config = EngineConfig(
        page_size=4, chunked_prefill_size=16, max_total_tokens=160, max_running_requests=1, adaptive=False
    )
    draft = Standalone(str(saved / "same"))
    engine = Engine.from_pretrained(str(saved / "model"), draft=draft, config=config, progress=False)
    assert (
        engine.speculation.note == "3 steps, top-k 1, 4 draft tokens (automatic); within the first 64 tokens of a text"
    )
    engine.generate(["the hell"], SamplingParams(max_new_tokens=14))
    assert engine.counters.drafted_steps > 0
    check_idle(engine)


def test_draft_with_another_tokenizer(saved):
    """test_eagle_serving.py has the other refusals."""
    speculative = flags.SpeculativeSettings("STANDALONE", speculative_draft_model_path=str(saved / "other"))
    chosen = flags.Settings(flags.ModelSettings(model=str(saved / "model")), speculative=speculative)
    message = (
        "^--speculative-draft-model-path .*other: its tokenizer is not the target's: id 0 is .* in the target's .*; a "
        "draft model with the target's tokenizer is needed$"
    )
    with pytest.raises(ValueError, match=message):
        build.make_engine(chosen, progress=False)


def test_flags_and_options():
    speculative = flags.SpeculativeSettings("STANDALONE", speculative_draft_model_path="m", speculative_num_steps=2)
    assert build.draft_options(flags.Settings(speculative=speculative)) == Standalone("m", None, 2)
    assert (Standalone("m").shape(), Standalone("m", topk=2).shape()) == (TreeShape(3, 1, 4), TreeShape(3, 2, 7))
    assert options_of("standalone", path="m") == Standalone("m") and Standalone.kind is None
    speculation = make_speculation(Standalone("m"), target=target().target, model=target().target)
    drafter = speculation.drafter
    assert (drafter.name, drafter.width, drafter.depth) == ("STANDALONE", 4, 3)
    assert speculation.costly_observe and not speculation.explicit_width
    buckets = Buckets.build("cpu", speculation, rows=4, request_pages=4)
    assert buckets.drafts(1) and not buckets.drafts(4), "as with a draft head"
