"""EAGLE, EAGLE-3 and FR-Spec as users meet them: flags and small checkpoints on disk in; texts, log lines and refusals
out. What a head computes is tested elsewhere; here a head of random weights must change nothing but the numbers."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distil import pair_model, small_head
from engine_helpers import VOCABULARY, byte_ids, check_idle, drain, outcome, tokenizer
from server_helpers import running
from specjax_kernels import CAUSAL
from tiny_checkpoints import save_llama
from tiny_heads import save_head

from specjax import PoolShape, init_cache
from specjax.cli import build, flags, generate
from specjax.cli import serve as command
from specjax.drafters import DraftOptions, Eagle, Eagle3, NoDraft, make_drafter
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.load import LoadedModel, load

LETTERS = byte_ids(b"aei")
"""What a map lets a head propose, and what a request with a bias for them writes."""
WHOLE = (2, 3, 13)
"""Steps, top-k and draft tokens of the tree that holds every text of two LETTERS: all are accepted, whatever the head
has learned."""
BIAS = {str(token): 60.0 for token in LETTERS}
SHAPE = {"target_vocab_size": VOCABULARY, "draft_vocab_size": len(LETTERS)}
OFFSETS = np.array(LETTERS) - np.arange(len(LETTERS))
MASK = np.isin(np.arange(VOCABULARY), LETTERS)


@functools.cache
def folder() -> Path:
    """A target of seven layers, the fewest that have EAGLE-3's default auxiliary layers, with a tokenizer."""
    made = Path(tempfile.mkdtemp(prefix="specjax-eagle-"))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "vocab_size": VOCABULARY}
    save_llama(made / "model", **sizes, initializer_range=0.3, eos_token_id=2)
    tokenizer().save_pretrained(made / "model")
    return made


@pytest.fixture(scope="module", autouse=True)
def tidy():
    yield
    shutil.rmtree(folder())


@functools.cache
def head(dialect: str, **changes: Any) -> str:
    """A saved head that fits the target, unless `changes` say otherwise. An EAGLE-3 head proposes LETTERS only."""
    kind = "eagle3" if dialect.startswith("eagle3") else "eagle"
    made = folder() / "-".join([dialect, *(f"{name}={value}" for name, value in changes.items())])
    sizes = SHAPE | changes
    replaced = {}
    if kind == "eagle3" and dialect != "eagle3-full-vocabulary" and not changes:
        replaced = {"d2t": OFFSETS, "t2d": MASK}
    save_head(made, kind, dialect=dialect, tensors=replaced, **sizes)
    return str(made)


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


def drafting(algorithm: str, dialect: str, *tree: int, **others: Any) -> list[str]:
    """The flags: of the tree steps, top-k and draft tokens, as many as are given."""
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", head(dialect)]
    for name, value in zip(("num-steps", "eagle-topk", "num-draft-tokens"), tree, strict=False):
        flags += [f"--speculative-{name}", str(value)]
    flags += [part for name, value in others.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return flags if tree else [*flags, "--no-speculative-adaptive"]  # every step drafts


SMALL = {"page_size": 4, "chunked_prefill_size": 16, "max_total_tokens": 160}


def make(draft: DraftOptions, **config: Any) -> Engine:
    settings = EngineConfig(**SMALL | config)
    return Engine.from_pretrained(str(folder() / "model"), draft=draft, config=settings, progress=False)


def whole() -> Eagle3:
    return Eagle3(head("eagle3"), None, *WHOLE)


@functools.cache
def eagle3() -> Engine:
    """Four rows, trees, and a pool that four long requests do not fit in."""
    return make(whole(), max_running_requests=4)


@functools.cache
def undrafted() -> Engine:
    return make(NoDraft(), max_running_requests=1)


# `specjax generate`.


LINES = [
    {"id": "greedy", "prompt": "the hell", "max_new_tokens": 14},
    {"id": "seeded", "prompt": "12 and 12", "temperature": 1.0, "seed": 7, "max_new_tokens": 14},
    {"id": "letters", "prompt": "a", "logit_bias": BIAS, "max_new_tokens": 20, "ignore_eos": True},
    {"id": "drawn letters", "prompt": "the the the the the the the", "logit_bias": BIAS, "temperature": 1.5,
     "top_p": 0.95, "seed": 3, "max_new_tokens": 17, "ignore_eos": True},
    {"id": "penalties", "messages": [{"role": "user", "content": "hello"}], "frequency_penalty": 0.5,
     "repetition_penalty": 1.2, "max_new_tokens": 9},
    {"id": "alone", "prompt": "x", "speculate": False, "max_new_tokens": 5},
]  # fmt: skip
SAME = ("id", "text", "output_ids", "prompt_tokens", "completion_tokens", "finish_reason", "seed")
QUICK = ["--chunked-prefill-size", "16", "--max-total-tokens", "160", "--no-progress"]


class Run(NamedTuple):
    rows: dict[str, dict[str, Any]]
    summary: dict[str, Any]

    @property
    def texts(self) -> list[list[Any]]:
        return [[row[name] for name in SAME] for row in self.rows.values()]


def complete(flags: List[str], capsys: pytest.CaptureFixture) -> Run:
    """A run of the command over LINES that says nothing on stderr."""
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "in.jsonl", Path(name) / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
        files = ["--model", str(folder() / "model"), "--input", str(source), "--output", str(target)]
        capsys.readouterr()
        status = generate.main([*files, *QUICK, *flags])
        printed = capsys.readouterr()
        assert (status, printed.err) == (0, "")
        rows = [json.loads(row) for row in target.read_text(encoding="utf-8").splitlines()]
    return Run({row["id"]: row for row in rows}, json.loads(printed.out.splitlines()[-1]))


@functools.cache
def plain() -> Run:
    """The same lines without drafts."""
    lines = [generate.parse_line(at, json.dumps(line), {"seed": 0}, at) for at, line in enumerate(LINES)]
    target = folder() / "plain.jsonl"
    with target.open("w", encoding="utf-8") as output:
        summary = generate.run(undrafted(), lines, generate.line_writer(output), progress=False)
    rows = [json.loads(row) for row in target.read_text(encoding="utf-8").splitlines()]
    return Run({row["id"]: row for row in rows}, summary)


WIDE = {"max_running_requests": 4, "page_size": 1}
NARROW = {"max_running_requests": 1, "page_size": 16}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            lambda: drafting("EAGLE", "eagle", *WHOLE, **WIDE, speculative_token_map=token_map("json")),
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: drafting("eagle", "eagle-nobias", 3, 2, 6, **NARROW), marks=pytest.mark.slow),
        lambda: drafting("EAGLE", "eagle-qwen2", 3, **NARROW | {"page_size": 1}, speculative_token_map=token_map("pt")),
        lambda: drafting("Eagle3", "eagle3", *WHOLE, **WIDE | {"page_size": 4}),  # the programs of `eagle3()`
        pytest.param(
            lambda: drafting("Eagle3", "eagle3-own-embedding", *WHOLE, **WIDE | {"page_size": 16}),
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: drafting("EAGLE3", "eagle3-speculators", 3, **NARROW), marks=pytest.mark.slow),
    ],
    ids=[
        "EAGLE tree, map",
        "EAGLE tree",
        "EAGLE chain, map of torch",
        "EAGLE3 tree",
        "EAGLE3 tree, own",
        "EAGLE3 chain",
    ],
)
def test_the_texts_are_those_without_drafts(given, capsys):
    given = given()
    whole = given[7:10:2] == ["3", "13"]
    found = complete(given, capsys)
    assert found.texts == plain().texts
    summary = found.summary
    assert summary["algorithm"] == given[1].upper()
    assert (summary["requests"], summary["failed"]) == (len(LINES), 0)
    for name in ("letters", "drawn letters"):
        row = found.rows[name]
        assert set(row["output_ids"]) <= set(LETTERS)
        if whole:
            assert row["spec_verify_ct"] == -(-(row["completion_tokens"] - 1) // 3), row
    assert len(set(found.rows["drawn letters"]["output_ids"])) > 1
    steps = sum(row["spec_verify_ct"] for row in found.rows.values())
    tokens = sum(row["completion_tokens"] - 1 for row in found.rows.values())
    assert summary["verify_steps"] == steps
    assert summary["accept_length"] == pytest.approx(tokens / steps, abs=1e-4)
    assert found.rows["alone"]["spec_accept_length"] == 1.0


# Which tree the flags mean, and who says so. Nothing is compiled for these.


def loaded(draft: DraftOptions) -> LoadedModel:
    return load(str(folder() / "model"), draft=draft, progress=False)


@pytest.mark.parametrize(
    ("given", "steps", "topk", "tokens", "how"),
    [
        ({}, 5, 4, 8, "automatic"),
        ({"steps": 2, "topk": 3, "nodes": 5}, 2, 3, 5, "given"),
        ({"steps": 4}, 4, 1, 5, "what was not given was chosen"),
        ({"nodes": 7}, 6, 1, 7, "what was not given was chosen"),
        ({"steps": 3, "topk": 4}, 3, 4, 13, "what was not given was chosen"),
        ({"steps": 1, "topk": 4}, 1, 4, 5, "what was not given was chosen"),
        ({"steps": 20, "topk": 8}, 20, 8, 64, "what was not given was chosen"),
        ({"topk": 2}, 5, 2, 11, "what was not given was chosen"),
        ({"topk": 1}, 5, 1, 6, "what was not given was chosen"),
        ({"topk": 2, "nodes": 4}, 5, 2, 4, "what was not given was chosen"),
    ],
)
def test_the_shape_of_the_tree(given, steps, topk, tokens, how, caplog):
    drafter = loaded(Eagle3(head("eagle3"), **given)).drafter
    assert drafter.note == f"{steps} steps, top-k {topk}, {tokens} draft tokens ({how})"
    assert (drafter.width, drafter.depth) == (tokens, min(steps, tokens - 1))
    assert drafter.name == "EAGLE3"
    assert not caplog.records


def test_targets_of_other_families_get_a_short_chain():
    toy = pair_model()
    drafter = make_drafter("EAGLE", target=toy.target, head=small_head("eagle", toy))
    assert drafter.note == "3 steps, top-k 1, 4 draft tokens (automatic)"


def test_a_drafter_needs_both_models():
    toy = pair_model()
    with pytest.raises(ValueError, match="what is given is a head of kind 'eagle' and no target"):
        make_drafter("EAGLE", head=small_head("eagle", toy))
    with pytest.raises(ValueError, match=r"what is given is no head$"):
        make_drafter("EAGLE3", target=toy.target)


def test_a_chain_has_a_token_a_step_and_the_root(caplog):
    drafter = loaded(Eagle(head("eagle"), steps=3, topk=1, nodes=9)).drafter
    assert (drafter.width, drafter.depth, drafter.name) == (4, 3, "EAGLE")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("4 draft tokens, not 9", "top-k 1", "chain"):
        assert part in record.getMessage()


def test_warnings_of_a_start(caplog):
    """A chain has as many tokens as steps; EAGLE-3 heads have a vocabulary of their own."""
    flags_given = {"speculative_num_steps": 3, "speculative_num_draft_tokens": 9, "speculative_token_map": "map.json"}
    speculative = flags.SpeculativeSettings("EAGLE3", head("eagle3"), **flags_given)
    chosen = flags.Settings(flags.ModelSettings(str(folder() / "model")), speculative=speculative)
    engine = build.make_engine(replace(chosen, engine=flags.EngineSettings(max_total_tokens=128)), progress=False)
    assert engine.drafter.width == 4
    np.testing.assert_array_equal(engine.params.draft["ids"], LETTERS)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "no effect with --speculative-algorithm EAGLE3: --speculative-token-map",
        "4 draft tokens, not 9: with top-k 1 the draft is a chain of steps + 1 tokens",
    ]


@pytest.mark.parametrize(("given", "limit"), [(None, 20), (26, 26), (128, None)])
def test_nothing_is_drafted_beyond_the_heads_positions(given, limit, caplog, tmp_path):
    save_head(
        tmp_path, "eagle3", tensors={"d2t": OFFSETS, "t2d": MASK}, config={"max_position_embeddings": 20}, **SHAPE
    )
    engine = make(Eagle3(str(tmp_path), None, *WHOLE, positions=given), max_running_requests=1, trace=True)
    warned = "has 20 positions, texts may have 128 tokens; nothing is drafted beyond the draft's positions"
    assert (warned in caplog.text) == (given is None)
    assert (f"; within the first {limit} tokens of a text" in engine.drafter.note) == (limit is not None)
    done = engine.generate([[20, 21, 22]], SamplingParams(max_new_tokens=30, ignore_eos=True))[0]
    trees = done.trees
    committed = 3 + np.cumsum([0, *(len(tree.emitted) for tree in trees)])[:-1]
    steps = WHOLE[0]
    assert [len(tree.tokens) > 1 for tree in trees] == [n + steps <= (limit or 128) for n in committed.tolist()]
    assert committed[-1] > 26


@pytest.mark.parametrize("dialect", ["eagle", "eagle-speculators"])
def test_a_token_map_gives_the_head_its_columns(dialect):
    params = loaded(Eagle(head(dialect), token_map=token_map("json"))).params
    np.testing.assert_array_equal(params.draft["ids"], LETTERS)
    assert "embed" not in params.draft, "an eagle head's embedding is the target's"
    unembedded = np.asarray(params.target["head"])
    np.testing.assert_array_equal(params.draft["head"], unembedded[:, LETTERS])


def test_the_server_says_what_was_chosen(caplog):
    caplog.set_level(logging.INFO, logger="specjax")
    speculative = flags.SpeculativeSettings("EAGLE3", head("eagle3-fused"))
    model, engine = flags.ModelSettings(str(folder() / "model")), flags.EngineSettings(max_total_tokens=128)
    engine = command.load(flags.Settings(model, engine, speculative))
    table = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("Speculation:"))
    assert table == (
        "Speculation:\n  algorithm  EAGLE3"
        "\n  tree       up to 8 tokens; 5 steps, top-k 4, 8 draft tokens (automatic)"
        f"\n  head       {head('eagle3-fused')}"
        "\n  drafts     in steps of one request where that is measured to be faster; larger batches are faster without "
        "drafts here, and draft only if the number of draft tokens is set"
    )


@pytest.mark.slow
def test_a_tree_that_was_asked_for_is_drafted_at_any_batch_size():
    """16 trees of 13 nodes are more than a CPU checks in the time of a plain step; 16 of the automatic 8 are, too."""
    asked = make(whole(), max_running_requests=16, max_total_tokens=1024)
    automatic = Engine.from_pretrained(
        str(folder() / "model"), draft=Eagle3(head("eagle3")), config=asked.config, progress=False,
    )  # fmt: skip
    params = [SamplingParams(max_new_tokens=14, logit_bias=BIAS, ignore_eos=True)] * 16  # one bucket: all end together
    found, plain = ({}, {})
    for engine, texts in ((asked, found), (automatic, plain)):
        for sequence in [engine.add([20 + i, 21], one) for i, one in enumerate(params)]:
            texts[sequence.id] = sequence
        while engine.unfinished:
            engine.step()
    assert [s.output.tokens for s in found.values()] == [s.output.tokens for s in plain.values()]
    assert [s.output.verify_steps for s in found.values()] == [5] * 16, "three of 13 tokens a step"
    assert automatic.buckets.tree_widths(16) == (1,), "these did not draft while all ran"


# What cannot work: one line that says why, status 2, and nothing large has been read.


@pytest.fixture
def refused(capsys, tmp_path):
    """refused(*flags) -> the one line on stderr of a run that could not start."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')

    def call(*given: Any) -> str:
        files = ["--model", folder() / "model", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
        capsys.readouterr()
        status = generate.main([str(part) for part in [*files, "--no-progress", *given]])
        printed = capsys.readouterr()
        assert (status, printed.out) == (2, "")
        (line,) = printed.err.splitlines()
        assert not (tmp_path / "out.jsonl").exists()
        return line.removeprefix("specjax generate: ")

    return call


DRAFT = "--speculative-draft-model-path"
ALGORITHM = "--speculative-algorithm"
TREE = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")


@pytest.mark.parametrize("name", ["EAGLE", "eagle3"])
def test_without_a_head(refused, name):
    assert refused(ALGORITHM, name) == f"{DRAFT} is missing: {name.upper()} needs a draft head"


@pytest.mark.parametrize("name", ["none", "ngram", "auto"])
def test_a_head_for_an_algorithm_that_has_none(refused, name):
    message = refused(ALGORITHM, name, DRAFT, "h")
    assert message.startswith(f"{DRAFT} h is no use to ") and f"{ALGORITHM} EAGLE or EAGLE3" in message


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ((2, 2, 8), (f"{TREE[2]} is 8", "2 steps of top-k 2 give 6 candidates", "at most 7 tokens")),
        ((None, 2, 20), (f"{TREE[2]} is 20", "5 steps of top-k 2 give 18 candidates", "at most 19 tokens")),
        ((2, 2, 1), (f"{TREE[2]} must be an integer from 2 to 512", "got 1")),
        ((None, None, 1), (f"{TREE[2]} must be an integer from 2 to 512", "got 1")),
        ((None, 1, 100), (f"{TREE[2]} must be from 2 to 65 for a chain", "got 100")),
        ((0, None, None), (f"{TREE[0]} must be an integer from 1 to 64", "got 0")),
        ((None, -1, None), (f"{TREE[1]} must be an integer from 1 to 64", "got -1")),
        ((65, 1, 2), (f"{TREE[0]} must be an integer from 1 to 64", "got 65")),
        ((9, 9, 513), (f"{TREE[2]} must be an integer from 2 to 512", "got 513")),
    ],
)
def test_a_tree_that_cannot_be_is_refused_before_anything_is_read(refused, tree, parts):
    given = [part for flag, value in zip(TREE, tree, strict=True) if value is not None for part in (flag, value)]
    message = refused(ALGORITHM, "EAGLE", DRAFT, "/no/such/head", "--model", "/no/such/model", *given)
    assert all(part in message for part in parts), message


def test_numbers_of_another_type_are_refused():
    """In a program of its own: the hook of these tests would refuse some in its own words."""
    program = """
from specjax import Eagle
for options in {"steps": 3.0}, {"steps": "3"}, {"topk": True}, {"nodes": 8.5}, {"path": 5}:
    try:
        Eagle(**options)
    except TypeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.splitlines() == [
        "Eagle.steps must be an integer from 1 to 64, got 3.0",
        "Eagle.steps must be an integer from 1 to 64, got '3'",
        "Eagle.topk must be an integer from 1 to 64, got True",
        "Eagle.nodes must be an integer from 2 to 512, got 8.5",
        "Eagle.path must be a string, got 5",
    ]


@pytest.mark.parametrize(("name", "dialect"), [("EAGLE", "eagle3"), ("EAGLE3", "eagle"), ("EAGLE3", "eagle-nobias")])
def test_a_head_of_the_other_kind_names_the_flag_that_works(refused, name, dialect):
    other = "EAGLE" if name == "EAGLE3" else "EAGLE3"
    message = refused(ALGORITHM, name, DRAFT, head(dialect))
    assert message.startswith(f"{DRAFT} {head(dialect)}: this is a head for {other}, not {name} ")


@pytest.mark.parametrize(
    ("name", "dialect", "changes", "parts"),
    [
        ("EAGLE", "eagle", {"hidden_size": 24}, ("[24, 48] is for another target", "[16, 32] is needed")),
        ("EAGLE", "eagle", {"target_vocab_size": 300}, ("vocab_size is 300", f"the target's is {VOCABULARY}")),
        (
            "EAGLE3",
            "eagle3",
            {"target_hidden_size": 24},
            ("[16, 72] is for another target", "[16, 48] is needed", "auxiliary layers 1, 2, 3"),
        ),
        ("EAGLE3", "eagle3", {"hidden_size": 24}, ("no embed_tokens.weight", "is 16 wide, the draft head 24")),
        (
            "EAGLE3",
            "eagle3",
            {"aux_layers": 2},
            ("[16, 32] is for another target", "[16, 48] is needed, for the auxiliary layers 1, 2, 3"),
        ),
        ("EAGLE3", "eagle3", {"target_vocab_size": 300}, ("vocab_size is 300", f"the target's is {VOCABULARY}")),
    ],
)
def test_a_head_that_does_not_fit(refused, name, dialect, changes, parts):
    given = head(dialect, **changes)
    message = refused(ALGORITHM, name, DRAFT, given)
    assert message.startswith(f"{DRAFT} {given}: ")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, VOCABULARY], f"entry 1 is {VOCABULARY}, outside the target's vocabulary 0..{VOCABULARY - 1}"),
        ([-1], "entry 0 is -1, outside"),
        ([5, 6, 5], "ids must differ; repeated: 5"),
        ([], "it holds []; a list or a tensor of token ids is needed"),
        ([1.5], "it holds [1.5]; a list or a tensor of token ids is needed"),
        ({"a": 1}, "it holds {'a': 1}; a list or a tensor of token ids is needed"),
    ],
)
def test_a_bad_token_map(refused, ids, message, tmp_path):
    (tmp_path / "map.json").write_text(json.dumps(ids))
    found = refused(*drafting("EAGLE", "eagle", speculative_token_map=tmp_path / "map.json"))
    assert found.startswith(f"--speculative-token-map {tmp_path}/map.json: {message}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("64", "a number needs a model with the vocabulary of a map that comes with specjax"),
        ("map.txt", "it is neither a number nor a file of a known format"),
        ("/no/map.json", "there is no such file"),
    ],
)
def test_a_token_map_that_is_not_there(refused, given, message):
    found = refused(*drafting("EAGLE", "eagle", speculative_token_map=given))
    assert found.startswith(f"--speculative-token-map {given}: {message}")


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3"])
def test_a_head_that_is_not_there(refused, name, tmp_path):
    for path in (tmp_path / "nowhere", tmp_path / "in.jsonl"):
        assert refused(ALGORITHM, name, DRAFT, path).startswith(f"{DRAFT} {path}: '{path}' is ")
    assert "has no config.json" in refused(ALGORITHM, name, DRAFT, tmp_path)


class Program:
    """What a pickle can do."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def test_a_pickle_that_is_a_program(refused, tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad"
    bad.mkdir()
    shutil.copy(Path(head("eagle")) / "config.json", bad)
    torch.save({"fc.weight": Program()}, bad / "pytorch_model.bin")
    torch.save([Program()], tmp_path / "map.pt")
    message = refused(ALGORITHM, "EAGLE", DRAFT, bad)
    assert message.startswith(f"{DRAFT} {bad}: ") and "asks for posix.system" in message
    message = refused(*drafting("EAGLE", "eagle", speculative_token_map=tmp_path / "map.pt"))
    assert message.startswith("--speculative-token-map") and "asks for posix.system" in message
    assert not (tmp_path / "pwned").exists()


# The engine itself, and the server over it.

REQUESTS = [
    ("the hell", SamplingParams(max_new_tokens=14)),
    ("12 and 12", SamplingParams(max_new_tokens=14, temperature=1.0, seed=7)),
    ("a" * 40, SamplingParams(max_new_tokens=60, temperature=1.3, seed=3, logit_bias=BIAS, ignore_eos=True)),
    ([70, 71, 72] * 6, SamplingParams(max_new_tokens=50, logit_bias=BIAS, ignore_eos=True)),
    ("hello hello", SamplingParams(max_new_tokens=20, frequency_penalty=0.5, repetition_penalty=1.2)),
    ("x", SamplingParams(max_new_tokens=3, speculate=False)),
]


def test_nothing_is_traced_or_compiled_while_serving():
    """All buckets are compiled ahead; then 1 to 4 requests of all kinds, aborts, and a pool that is too small."""
    engine = eagle3()
    engine.warm_up(progress=False)
    seen = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "compile" in event or "trace" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + len(seen))(np.float32(1))
        assert seen, "the listener hears"
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


def test_steps_in_three_phases_write_the_same():
    timed = make(whole(), max_running_requests=4, time_phases=True)
    timed.warm_up([timed.buckets.all_keys()[-1]], progress=False)  # the largest batch serves all
    prompts, params = [prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS]
    expected = [outcome(done) for done in undrafted().generate(prompts, params)]
    found = timed.generate(prompts, params)
    assert [outcome(done) for done in found] == expected
    assert [outcome(done) for done in eagle3().generate(prompts, params)] == expected
    assert [done.spec_verify_ct for done in found[2:4]] == [-(-59 // 3), -(-49 // 3)]
    times = timed.programs.phase_times
    assert times is not None and times.steps == timed.counters.steps > 0
    assert min(times.draft, times.verify, times.commit) > 0
    check_idle(timed)


def forward(tokens: List[int]) -> np.ndarray:
    """[X, V]: the log-softmax after each token, by one forward of the target without pages and drafts."""
    engine = undrafted()
    target, params = engine.target, engine.params.target
    zero, ids = jnp.zeros(1, jnp.int32), jnp.asarray([tokens], jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    cache = init_cache(target.pages, PoolShape(1, 1))
    output = target.forward(params, target.embed(params, ids), positions, CAUSAL, cache, zero[None], zero)
    return np.asarray(jax.nn.log_softmax(target.unembed(params, output.hidden)[0], axis=-1))


def test_log_probabilities_are_those_of_a_forward():
    """Of prompts and outputs, greedy and drawn, through trees of which much is accepted."""
    more = {"logprobs": 3, "logprob_start_len": 0, "max_new_tokens": 24, "ignore_eos": True}
    each = [SamplingParams(**more, temperature=0.9, seed=2), SamplingParams(**more)]
    each += [SamplingParams(**more, temperature=1.5, seed=3, logit_bias=BIAS), SamplingParams(**more, logit_bias=BIAS)]
    prompts = ["the hell", "12 and 12 and 12 and 12", "a", "hello"]
    found = eagle3().generate(prompts, each)
    assert [done.spec_verify_ct for done in found[2:]] == [-(-23 // 3)] * 2, "three tokens a step"
    for prompt, done in zip(prompts, found, strict=True):
        ids = eagle3().encode(prompt)
        expected = forward([*ids, *done.output_ids])
        entries = [*done.prompt_logprobs, *done.logprobs]
        assert [one.token for one in entries] == [*ids, *done.output_ids] and entries[0].logprob is None
        for place, one in enumerate(entries[1:]):
            assert one.logprob == pytest.approx(expected[place, one.token], abs=1e-4)
            assert [value for _, value in one.top] == pytest.approx(np.sort(expected[place])[::-1][:3], abs=1e-4)
    check_idle(eagle3())


CASES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11, "top_p": 0.9},
    "letters": {"temperature": 1.2, "seed": 5, "logit_bias": BIAS},
}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with running(eagle3()) as served:
        yield served


@pytest.mark.parametrize("case", CASES)
def test_the_server_answers_with_the_same_texts(server, case):
    fields = CASES[case]
    params = SamplingParams(max_new_tokens=20, **fields)
    chat, plain = (undrafted().generate(prompt, params) for prompt in (MESSAGES, "the hell"))
    body = server.chat("hello", max_tokens=20, return_speculative_metrics=True, **fields).json()
    assert body["choices"][0]["message"]["content"] == chat.text
    assert body["usage"]["completion_tokens"] == len(chat.output_ids)
    metrics = body["metadata"]["speculative"]
    assert sum(metrics["spec_accept_histogram"]) == metrics["spec_verify_ct"] > 0
    if case == "letters":
        assert (metrics["spec_verify_ct"], metrics["spec_accept_histogram"][2:]) == (7, [6])
    assert server.complete("the hell", max_tokens=20, **fields).json()["choices"][0]["text"] == plain.text
    events = server.events("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, **fields})
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == chat.text and sum(map(bool, pieces)) > 1


def test_the_server_tells_what_it_runs(server):
    with server.client() as client:
        info = client.get("/get_model_info").json()
        assert (info["speculative_algorithm"], info["speculative_num_draft_tokens"]) == ("EAGLE3", WHOLE[2])
        assert client.get("/health").status_code == 200
        assert client.post("/flush_cache").status_code == 200
    params = {"max_new_tokens": 14, "temperature": 0.0}
    answer = server.post("/generate", {"text": "the hell", "sampling_params": params}).json()
    assert answer["text"] == undrafted().generate(*REQUESTS[0]).text, "also with the draft's cache forgotten"
    assert answer["meta_info"]["spec_verify_ct"] > 0
