"""EAGLE, EAGLE-3, MTP heads and FR-Spec by flags and checkpoints on disk: texts, log lines and errors."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from distil import pair_model, small_head
from engine_helpers import VOCABULARY, byte_ids, check_idle, drain, tokenizer
from tiny_checkpoints import save_llama
from tiny_heads import DIALECTS, save_head

from specjax.cli import build, flags, generate
from specjax.cli import serve as command
from specjax.drafters import DraftOptions, Eagle, Eagle3, NoDraft, make_speculation
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.load import LoadedModel, load

LETTERS = byte_ids(b"aei")
"""Tokens of the map; requests with a bias write these only."""
WHOLE = (2, 3, 13)
"""Steps, top-k and draft tokens of the tree that holds every text of two LETTERS: all are accepted with any head."""
BIAS = {str(token): 60.0 for token in LETTERS}
SHAPE = {"target_vocab_size": VOCABULARY, "draft_vocab_size": len(LETTERS)}
OFFSETS = np.array(LETTERS) - np.arange(len(LETTERS))
MASK = np.isin(np.arange(VOCABULARY), LETTERS)


@functools.cache
def folder() -> Path:
    """A target with a tokenizer, of seven layers: the fewest that EAGLE-3's default auxiliary layers need."""
    path = Path(tempfile.mkdtemp(prefix="specjax-eagle-"))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "vocab_size": VOCABULARY}
    save_llama(path / "model", **sizes, initializer_range=0.3, eos_token_id=2)
    tokenizer().save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module", autouse=True)
def tidy():
    yield
    shutil.rmtree(folder())


@functools.cache
def head(dialect: str, **changes: Any) -> str:
    """A saved head that fits the target, unless `changes` say otherwise. An EAGLE-3 head proposes LETTERS only."""
    kind = DIALECTS[dialect]
    path = folder() / "-".join([dialect, *(f"{name}={value}" for name, value in changes.items())])
    tensors = {"d2t": OFFSETS, "t2d": MASK} if kind == "eagle3" and not changes else {}
    save_head(path, kind, dialect=dialect, tensors=tensors, **SHAPE | changes)
    return str(path)


@functools.cache
def token_map(suffix: str) -> str:
    """LETTERS as a file."""
    import torch

    file = folder() / f"letters.{suffix}"
    if suffix == "json":
        file.write_text(json.dumps(LETTERS))
    else:
        torch.save(torch.tensor(LETTERS), file)
    return str(file)


SMALL = {"page_size": 4, "chunked_prefill_size": 16, "max_total_tokens": 160, "adaptive": False}


def make(draft: DraftOptions, **config: Any) -> Engine:
    settings = EngineConfig(**SMALL | config)
    return Engine.from_pretrained(str(folder() / "model"), draft=draft, config=settings, progress=False)


def whole() -> Eagle3:
    return Eagle3(head("eagle3"), None, *WHOLE)


@functools.cache
def eagle3() -> Engine:
    """Four rows, trees, and a pool that is too small for four long requests."""
    return make(whole(), max_running_requests=4)


REQUESTS = [
    ("the hell", SamplingParams(max_new_tokens=14)),
    ("12 and 12", SamplingParams(max_new_tokens=14, temperature=1.0, seed=7)),
    ("a" * 40, SamplingParams(max_new_tokens=60, temperature=1.3, seed=3, logit_bias=BIAS, ignore_eos=True)),
    ([70, 71, 72] * 6, SamplingParams(max_new_tokens=50, logit_bias=BIAS, ignore_eos=True)),
    ("hello hello", SamplingParams(max_new_tokens=20, frequency_penalty=0.5, repetition_penalty=1.2)),
    ("x", SamplingParams(max_new_tokens=3, speculate=False)),
]


def test_drafts_of_a_saved_head():
    """Texts of LETTERS only: each step accepts both levels of the tree."""
    engine = eagle3()
    completions = engine.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    assert [done.spec_verify_ct for done in completions[2:4]] == [-(-59 // 3), -(-49 // 3)]
    check_idle(engine)


NORMS = [*itertools.product((False, True), repeat=3)]


@pytest.mark.parametrize(
    "norms",
    [pytest.param(norms, marks=() if norms == (False, True, True) else pytest.mark.slow) for norms in NORMS],
    ids=lambda norms: "".join("01"[norm] for norm in norms),
)
def test_texts_of_eagle31_heads(tmp_path, norms):
    """Texts are those without drafts."""
    keys = dict(zip(("norm_before_fc", "fc_norm", "norm_output"), norms, strict=True))
    tensors = {"d2t": OFFSETS, "t2d": MASK}
    tensors |= {"input_norm.weight": np.linspace(0.5, 1.5, 48, dtype=np.float32)} if norms[0] else {}
    each = {f"fc_norm.{i}.weight": np.linspace(1.5, 0.5, 16, dtype=np.float32) for i in range(3)}
    save_head(tmp_path, "eagle3", config=keys, tensors=tensors | (each if norms[1] else {}), **SHAPE)
    prompts, params = zip(*REQUESTS, strict=True)
    drafted = make(Eagle3(str(tmp_path), None, *WHOLE), max_running_requests=4).generate(prompts, params)
    assert [done.output_ids for done in drafted] == plain_texts()
    assert [done.spec_verify_ct for done in drafted[2:4]] == [-(-59 // 3), -(-49 // 3)]


@functools.cache
def plain_texts() -> list[list[int]]:
    prompts, params = zip(*REQUESTS, strict=True)
    return [done.output_ids for done in make(NoDraft(), max_running_requests=4).generate(prompts, params)]


# Trees by flags. Nothing is compiled for these.


def loaded(draft: DraftOptions) -> LoadedModel:
    return load(str(folder() / "model"), draft=draft, progress=False)


@pytest.mark.parametrize(
    ("options", "steps", "topk", "tokens", "how"),
    [
        ({}, 5, 4, 8, "automatic"),
        ({"steps": 2, "topk": 3, "nodes": 5}, 2, 3, 5, "set by options"),
        ({"steps": 4}, 4, 1, 5, "partly automatic"),
        ({"nodes": 7}, 6, 1, 7, "partly automatic"),
        ({"steps": 3, "topk": 4}, 3, 4, 13, "partly automatic"),
        ({"steps": 20, "topk": 8}, 20, 8, 64, "partly automatic"),
        ({"topk": 2}, 5, 2, 11, "partly automatic"),
        ({"topk": 2, "nodes": 4}, 5, 2, 4, "partly automatic"),
    ],
)
def test_tree_shape_options(options, steps, topk, tokens, how, caplog):
    caplog.set_level(logging.WARNING)  # another test may have lowered it
    model = loaded(Eagle3(head("eagle3"), **options))
    drafter = model.drafter
    assert model.speculation.note == f"{steps} steps, top-k {topk}, {tokens} draft tokens ({how})"
    assert (drafter.width, drafter.depth) == (tokens, min(steps, tokens - 1))
    assert drafter.name == "EAGLE3"
    assert not caplog.records


def test_make_speculation():
    toy = pair_model()
    config = small_head("eagle", toy)
    speculation = make_speculation("EAGLE", target=toy.target, head=config)
    assert speculation.note == "3 steps, top-k 1, 4 draft tokens (automatic)", "the target is no Llama"
    assert (speculation.coupling, make_speculation("NGRAM").coupling) == ("noise", "none")


def test_warnings(caplog):
    caplog.set_level(logging.WARNING)  # another test may have lowered it
    flags_given = {"speculative_num_steps": 3, "speculative_num_draft_tokens": 9, "speculative_token_map": "map.json"}
    speculative = flags.SpeculativeSettings("EAGLE3", speculative_draft_model_path=head("eagle3"), **flags_given)
    chosen = flags.Settings(flags.ModelSettings(str(folder() / "model")), speculative=speculative)
    engine = build.make_engine(replace(chosen, engine=flags.EngineSettings(max_total_tokens=128)), progress=False)
    assert engine.drafter.width == 4
    np.testing.assert_array_equal(engine.params.draft["ids"], LETTERS)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "no effect with --speculative-algorithm EAGLE3: --speculative-token-map",
        "4 draft tokens, not 9: with top-k 1 the draft is a chain of steps + 1 tokens",
    ]


@pytest.mark.parametrize(("options", "limit"), [(None, 20), (128, None)])
def test_no_drafts_beyond_the_heads_positions(options, limit, tmp_path):
    save_head(
        tmp_path, "eagle3", tensors={"d2t": OFFSETS, "t2d": MASK}, config={"max_position_embeddings": 20}, **SHAPE
    )
    engine = make(Eagle3(str(tmp_path), None, *WHOLE, positions=options), max_running_requests=1, trace=True)
    assert (f"; within the first {limit} tokens of a text" in engine.speculation.note) == (limit is not None)
    done = engine.generate([[20, 21, 22]], SamplingParams(max_new_tokens=30, ignore_eos=True))[0]
    trees = done.trees
    committed = 3 + np.cumsum([0, *(len(tree.emitted) for tree in trees)])[:-1]
    steps = WHOLE[0]
    assert [len(tree.tokens) > 1 for tree in trees] == [n + steps <= (limit or 128) for n in committed.tolist()]
    assert committed[-1] > 26


@pytest.mark.parametrize("dialect", ["eagle", "eagle-speculators"])
def test_token_map_selects_columns(dialect):
    params = loaded(Eagle(head(dialect), token_map=token_map("json"))).params
    np.testing.assert_array_equal(params.draft["ids"], LETTERS)
    assert "embed" not in params.draft, "an eagle head's embedding is the target's"
    unembedded = np.asarray(params.target["head"])
    np.testing.assert_array_equal(params.draft["head"], unembedded[:, LETTERS])


def test_log_of_a_start(caplog):
    caplog.set_level(logging.INFO, logger="specjax")
    speculative = flags.SpeculativeSettings("EAGLE3", speculative_draft_model_path=head("eagle3"))
    model, engine = flags.ModelSettings(str(folder() / "model")), flags.EngineSettings(max_total_tokens=128)
    engine = command.load(flags.Settings(model, engine, speculative))
    table = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("Speculation:"))
    assert table == (
        "Speculation:\n  algorithm  EAGLE3"
        "\n  tree       up to 8 tokens; 5 steps, top-k 4, 8 draft tokens (automatic)"
        f"\n  head       {head('eagle3')}"
        "\n  drafts     in steps of one request where that is measured to be faster; larger batches are faster without "
        "drafts here, and draft only if the number of draft tokens is set"
    )


# Refused starts: one line on stderr, status 2, and nothing large has been read.


DRAFT, ALGORITHM, MAP = "--speculative-draft-model-path", "--speculative-algorithm", "--speculative-token-map"
STEPS, TOPK, NODES = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
HERE = Path(__file__)
NOWHERE = ("EAGLE", DRAFT, "/no/such/head", "--model", "/no/such/model")
REFUSED: list[tuple[tuple[Any, ...], tuple[str, ...]]] = [
    (("EAGLE",), (f"{DRAFT} is missing: EAGLE needs a draft head",)),
    (("eagle3",), (f"{DRAFT} is missing: EAGLE3 needs a draft head",)),
    (("STANDALONE",), (f"{DRAFT} is missing: STANDALONE needs a draft model",)),
    *(((name, DRAFT, "h"), (f"{DRAFT} h is no use to ", f"{ALGORITHM} EAGLE or EAGLE3"))
      for name in ("none", "ngram", "auto")),
    (("STANDALONE", DRAFT, "/nowhere"), (f"{DRAFT} /nowhere",)),
    (("EAGLE", DRAFT, "/nowhere"), (f"{DRAFT} /nowhere: '/nowhere' is ",)),
    (("EAGLE", DRAFT, HERE), (f"{DRAFT} {HERE}: '{HERE}' is ",)),
    (("EAGLE", DRAFT, HERE.parent), ("has no config.json",)),
    ((*NOWHERE, STEPS, 2, TOPK, 2, NODES, 8), (f"{NODES} is 8", "2 steps of top-k 2 give 6 candidates", "at most 7")),
    ((*NOWHERE, TOPK, 2, NODES, 20), (f"{NODES} is 20", "5 steps of top-k 2 give 18 candidates", "at most 19 tokens")),
    ((*NOWHERE, NODES, 1), (f"{NODES} must be an integer from 2 to 512", "got 1")),
    ((*NOWHERE, TOPK, 1, NODES, 100), (f"{NODES} must be from 2 to 65 for a chain", "got 100")),
    ((*NOWHERE, STEPS, 0), (f"{STEPS} must be an integer from 1 to 64", "got 0")),
    ((*NOWHERE, TOPK, -1), (f"{TOPK} must be an integer from 1 to 64", "got -1")),
    ((*NOWHERE, STEPS, 9, TOPK, 9, NODES, 513), (f"{NODES} must be an integer from 2 to 512", "got 513")),
    # tests/checkpoint has all errors of heads and token maps.
    (("EAGLE", DRAFT, "@eagle3"), (f"{DRAFT} ", ": this is a head for EAGLE3, not EAGLE ")),
    (("EAGLE", DRAFT, "@eagle", MAP, 64), (f"{MAP} 64: a number needs a model with SmolLM2's vocabulary",)),
    (("EAGLE", DRAFT, "@eagle", MAP, "/no/map.json"), (f"{MAP} /no/map.json: there is no such file",)),
]  # fmt: skip
"""Flags, of which @ is a head of this file, and parts of the message."""


@pytest.mark.parametrize(("options", "parts"), REFUSED)
def test_refused_starts(options, parts, capsys, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    files = ["--model", folder() / "model", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    options = [head(part[1:]) if str(part).startswith("@") else part for part in options]
    capsys.readouterr()
    status = generate.main([str(part) for part in [*files, "--no-progress", ALGORITHM, *options]])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    assert not (tmp_path / "out.jsonl").exists()
    message = line.removeprefix("specjax generate: ")
    assert message.startswith(parts[0]) or "config.json" in parts[0], message
    assert all(part in message for part in parts), message


# The engine.


def test_no_compilation_after_warm_up():
    """With 1 to 6 requests, aborts, and a pool that is too small."""
    engine = eagle3()
    engine.warm_up(progress=False)
    seen = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "compile" in event or "trace" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + len(seen))(np.float32(1))
        assert seen, "the listener works"
        seen.clear()
        compiled = engine.programs.compiled()
        for count in (1, 2, 3, 4, 6):
            for at, (prompt, params) in enumerate(REQUESTS[:count]):
                engine.add(prompt, params, id=f"{count}.{at}")
            for _ in range(3):
                engine.step()
            assert engine.abort(f"{count}.0")
            drain(engine)
        assert engine.scheduler.retractions > 0
        assert seen == []
        assert engine.programs.compiled() == compiled == {*engine.buckets.all_keys()}
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    check_idle(engine)
