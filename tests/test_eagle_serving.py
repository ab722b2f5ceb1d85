"""EAGLE, EAGLE-3 and FR-Spec as users meet them: flags and small checkpoints on disk in; texts, log lines and refusals
out. What a head computes is tested elsewhere; here a head of random weights must change nothing but the numbers."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import tempfile
import zipfile
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from engine_helpers import VOCABULARY, byte_ids, check_idle, drain, outcome, tokenizer
from server_helpers import running
from tiny_checkpoints import save_llama
from tiny_heads import save_head

from specjax import generate
from specjax.checkpoint import CheckpointError
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.engine.loading import Loaded, load
from specjax.serve import command
from specjax.settings import parse

LETTERS = byte_ids(b"aeio")
"""What a map lets a head propose, and what a request with a bias for them writes: then every tree of top-k 4 holds the
next token, whatever its head has learned."""
BIAS = {str(token): 60.0 for token in LETTERS}
SHAPE = {"target_vocab_size": VOCABULARY, "draft_vocab_size": len(LETTERS)}
OFFSETS = np.array(LETTERS) - np.arange(len(LETTERS))
MASK = np.isin(np.arange(VOCABULARY), LETTERS)


@functools.cache
def folder() -> Path:
    """A target of seven layers, the fewest that have EAGLE-3's default taps, with a tokenizer."""
    keep = tempfile.TemporaryDirectory(prefix="specjax-eagle-")
    _KEPT.append(keep)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "vocab_size": VOCABULARY}
    save_llama(Path(keep.name) / "model", **sizes, initializer_range=0.3, eos_token_id=2)
    tokenizer().save_pretrained(Path(keep.name) / "model")
    return Path(keep.name)


_KEPT: list[tempfile.TemporaryDirectory] = []
"""Gone at the end of the process."""


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
    return flags + [part for name, value in others.items() for part in (f"--{name.replace('_', '-')}", str(value))]


# `python -m specjax.generate`.


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
QUICK = ["--chunked-prefill-size", "16", "--max-total-tokens", "512", "--no-progress"]


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


PLAIN: list[Run] = []


def plain(capsys: pytest.CaptureFixture) -> Run:
    if not PLAIN:
        PLAIN.append(complete(["--speculative-algorithm", "none", "--max-running-requests", "4"], capsys))
    return PLAIN[0]


WIDE = {"max_running_requests": 4, "page_size": 1}
NARROW = {"max_running_requests": 1, "page_size": 16}


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        # With a map of LETTERS every tree of top-k 4 holds what such a request draws next; a chain holds it at times.
        (lambda: drafting("EAGLE", "eagle", 3, 4, 9, **WIDE, speculative_token_map=token_map("json")), 2.0),
        (lambda: drafting("eagle", "eagle-nobias", 2, 4, 7, **NARROW, speculative_token_map=token_map("pt")), 2.0),
        (lambda: drafting("EAGLE", "eagle-qwen2", 3, max_running_requests=1, page_size=1), 1.0),
        (lambda: drafting("Eagle3", "eagle3-own-embedding", 3, 4, 9, max_running_requests=4, page_size=16), 2.0),
        (lambda: drafting("EAGLE3", "eagle3-speculators", 3, **NARROW), 1.05),
    ],
    ids=["EAGLE tree, map", "EAGLE tree, map of torch", "EAGLE chain", "EAGLE3 tree", "EAGLE3 chain"],
)  # fmt: skip
def test_the_texts_are_those_without_drafts(flags, least, capsys):
    given = flags()
    expected, found = plain(capsys), complete(given, capsys)
    assert found.texts == expected.texts
    summary = found.summary
    assert summary["algorithm"] == given[1].upper()
    assert (summary["requests"], summary["failed"]) == (len(LINES), 0)
    for name in ("letters", "drawn letters"):
        assert set(found.rows[name]["output_ids"]) <= set(LETTERS)
        # The last step of a text may be cut short.
        row = found.rows[name]
        assert row["completion_tokens"] - 1 >= least * (row["spec_verify_ct"] - 1), row
    assert len(set(found.rows["drawn letters"]["output_ids"])) > 1
    steps = sum(row["spec_verify_ct"] for row in found.rows.values())
    tokens = sum(row["completion_tokens"] - 1 for row in found.rows.values())
    assert summary["verify_steps"] == steps
    assert summary["accept_length"] == pytest.approx(tokens / steps, abs=1e-4)
    assert summary["accept_length"] > (1.2 if least == 2.0 else 0.99)
    assert found.rows["alone"]["spec_accept_length"] == 1.0


# Which tree the flags mean, and who says so. Nothing is compiled for these.


def loaded(algorithm: str, dialect: str, **flags: Any) -> Loaded:
    return load(
        str(folder() / "model"), dtype="auto", algorithm=algorithm, revision=None, tokenizer_path=None,
        chat_template=None, backend=None, progress=False, algorithm_flags={"draft_model_path": head(dialect), **flags},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "steps", "topk", "tokens", "how"),
    [
        ({}, 5, 4, 8, "automatic"),
        ({"num_steps": 2, "eagle_topk": 3, "num_draft_tokens": 5}, 2, 3, 5, "given"),
        ({"num_steps": 4}, 4, 1, 5, "what was not given was chosen"),
        ({"num_draft_tokens": 7}, 6, 1, 7, "what was not given was chosen"),
        ({"num_steps": 3, "eagle_topk": 4}, 3, 4, 13, "what was not given was chosen"),
        ({"num_steps": 1, "eagle_topk": 4}, 1, 4, 5, "what was not given was chosen"),
        ({"num_steps": 20, "eagle_topk": 8}, 20, 8, 64, "what was not given was chosen"),
        ({"eagle_topk": 2}, 5, 2, 11, "what was not given was chosen"),
        ({"eagle_topk": 1}, 5, 1, 6, "what was not given was chosen"),
        ({"eagle_topk": 2, "num_draft_tokens": 4}, 5, 2, 4, "what was not given was chosen"),
    ],
)
def test_the_shape_of_the_tree(flags, steps, topk, tokens, how, caplog):
    drafter = loaded("EAGLE3", "eagle3", **flags).drafter
    assert drafter.note == f"{steps} steps, top-k {topk}, {tokens} draft tokens ({how})"
    assert (drafter.width, drafter.depth) == (tokens, min(steps, tokens - 1))
    assert drafter.name == "EAGLE3"
    assert not caplog.records


def test_a_chain_has_a_token_a_step_and_the_root(caplog):
    drafter = loaded("EAGLE", "eagle", num_steps=3, eagle_topk=1, num_draft_tokens=9).drafter
    assert (drafter.width, drafter.depth, drafter.name) == (4, 3, "EAGLE")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("--speculative-num-draft-tokens is 4 and not 9", "--speculative-eagle-topk 1", "chain"):
        assert part in record.getMessage()


def test_a_token_map_is_no_use_to_eagle3(caplog):
    found = loaded("EAGLE3", "eagle3", token_map="no-such-file.json")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "--speculative-token-map no-such-file.json is ignored: EAGLE3" in record.getMessage()
    np.testing.assert_array_equal(found.params.draft["ids"], LETTERS)


@pytest.mark.parametrize("dialect", ["eagle", "eagle-speculators"])
def test_a_token_map_gives_the_head_its_columns(dialect):
    params = loaded("EAGLE", dialect, token_map=token_map("json")).params
    np.testing.assert_array_equal(params.draft["ids"], LETTERS)
    assert "embed" not in params.draft, "an eagle head's embedding is the target's"
    unembedded = np.asarray(params.target["head"])
    np.testing.assert_array_equal(params.draft["head"], unembedded[:, LETTERS])


def test_the_server_says_what_was_chosen(caplog):
    caplog.set_level(logging.INFO, logger="specjax")
    flags = ["--model", str(folder() / "model"), *drafting("EAGLE3", "eagle3-fused"), "--max-total-tokens", "128"]
    import argparse

    from specjax import flags as all_flags
    from specjax.settings import add_flags

    parser = argparse.ArgumentParser()
    add_flags(parser, all_flags.Settings())
    engine = command.load(parse(parser, flags, all_flags.Settings())[1])
    line = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("Speculation: "))
    assert line.startswith("Speculation: EAGLE3, trees of up to 8 tokens, ")
    assert line.endswith(" for the draft; 5 steps, top-k 4, 8 draft tokens (automatic)")
    assert engine.drafter.note in line
