"""docs/drafters.md and examples/medusa.py: their code runs unchanged, drafters do not change texts, the verifier
accepts more, and `observe` receives the documented arguments."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import toy
from generate_helpers import saved_model
from oracle import Sampling
from toy_models import Runner, table_model
from train_helpers import environment

import specjax
from specjax import AcceptAbove, Drafter, Params, SamplingParams, load_drafter, make_speculation
from specjax.drafters.base import put_rows, take_rows

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
MEDUSA = (ROOT / "examples" / "medusa.py").read_text(encoding="utf-8")
DRAFTER, VERIFIER, ENGINE = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
COMMAND = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)[0]
ALIAS = "smollm2-135m-instruct"


def run(block: str, names: dict | None = None) -> dict:
    """Runs code; returns the names that it defines, and those of `names`."""
    names = {"__name__": "__main__"} if names is None else names
    exec(compile(block, "documentation", "exec"), names)
    return names


@pytest.fixture(scope="module")
def guide() -> dict:
    return run(DRAFTER + VERIFIER)


def run_medusa(model: str) -> dict:
    """The names that examples/medusa.py defines, with `model` in place of the built-in one."""
    # optax relies on type promotion.
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        load = specjax.load.load
        patch.setattr(
            specjax.load, "load", lambda name, **arguments: load(model if name == ALIAS else name, **arguments)
        )
        return run(MEDUSA)


@pytest.fixture(scope="module")
def medusa(tmp_path_factory) -> dict:
    """The names that examples/medusa.py defines, with a tiny random model."""
    return run_medusa(saved_model(tmp_path_factory.mktemp("medusa"), max_position_embeddings=512))


@pytest.fixture
def my_drafter(tmp_path, monkeypatch) -> Path:
    """The guide's file, in a folder on Python's path."""
    (tmp_path / "my_drafter.py").write_text(DRAFTER + VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_drafter", None)


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ({"drafter": "prompt_lookup"}, True),
        ({"draft": "my_drafter:prompt_lookup"}, True),
        ({"drafter": "prompt_lookup", "adaptive": True}, False),
        ({"drafter": "lossy", "adaptive": True}, True),
        ({"draft": "NGRAM", "verify": "likely_enough"}, True),
        ({"draft": "NGRAM", "verify": AcceptAbove()}, True),
        ({"draft": "NGRAM"}, False),
    ],
    ids=str,
)
def test_what_the_caller_passes_drafts_in_every_step(guide, my_drafter, tmp_path, options, drafts):
    options = dict(options)
    options |= {name: guide[options[name]] for name in ("drafter", "verify") if options.get(name) in guide}
    config = specjax.EngineConfig(max_running_requests=4, max_total_tokens=1024, adaptive=options.pop("adaptive", None))
    model = saved_model(tmp_path, max_position_embeddings=256)
    engine = specjax.Engine.from_pretrained(model, config=config, compilation_cache=False, progress=False, **options)
    assert (engine.policy is None) == drafts
    if drafts:
        assert set(engine.buckets.trees.values()) == {engine.drafter.width}
        done = engine.generate([[5, 6, 7] * 8] * 2, SamplingParams(max_new_tokens=9, ignore_eos=True))
        assert all(one.drafted_steps == one.spec_verify_ct > 0 for one in done)


def test_without_the_engine(medusa):
    names = medusa
    tokens, hidden = names["tokens"], names["hidden"]
    assert names["predicted"][0, len(names["prompt"]) - 1 : -1].tolist() == tokens, "hidden states equal the steps'"
    assert names["layers"].shape == (*hidden.shape[:2], 2 * hidden.shape[2])
    assert names["drafted"] == names["done"].output_ids == tokens, "lossless"
    assert names["taken"] < len(tokens) - 1, "the trained heads are accepted"
    assert names["done"].spec_verify_ct == names["taken"]


def test_in_the_bare_step(guide, medusa):
    # Five tokens: windows repeat, but their earlier continuation is often only the second best.
    table = np.random.default_rng(3).normal(0, 0.7, (997, 5)).astype(np.float32)
    model = table_model(table, window=4)
    params, prompt = Params(model.params), [1, 2, 3, 1, 2, 3, 1, 2]

    def run(drafter, **options):
        return medusa["generate"](model.target, params, drafter, prompt, 60, **options)

    plain, steps = run(make_speculation("NONE").drafter)
    assert steps == 59
    drafted, fewer = run(guide["prompt_lookup"](model.target))
    assert drafted == plain, "lossless"
    assert fewer < steps
    lossy, least = run(guide["prompt_lookup"](model.target), verify=guide["likely_enough"])
    assert len(lossy) == len(plain)
    assert least < fewer, "it accepts more"


@pytest.mark.parametrize(
    "built_in", [pytest.param(True, marks=[pytest.mark.real_model, pytest.mark.slow]), False], ids=["built in", "tiny"]
)
def test_with_a_model(my_drafter, built_in, tmp_path, monkeypatch, capsys):
    if not built_in:
        model = saved_model(tmp_path, max_position_embeddings=256)
        config = specjax.EngineConfig(max_running_requests=1, max_total_tokens=256, chunked_prefill_size=16)
        load = partial(specjax.Engine.from_pretrained, model, config=config, compilation_cache=False)
        monkeypatch.setattr(specjax.Engine, "from_pretrained", load)
    names = run(ENGINE)
    (lossless, text), (lossy, _) = (line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    plain = specjax.Engine.from_pretrained(draft="NONE", progress=False).generate(names["prompt"], names["params"])
    assert text == repr(plain.text)
    assert 1 <= float(lossless) <= float(lossy)
    assert float(lossless) > 1 or not built_in, "a random model repeats nothing"


@pytest.mark.process
def test_in_the_benchmark(my_drafter, tmp_path):
    path = os.pathsep.join([str(my_drafter), str(ROOT), str(ROOT / "kernels")])
    words = COMMAND.replace("PYTHONPATH=. specjax", "-m specjax").split()
    model = saved_model(tmp_path, max_position_embeddings=1024)
    few = ["--model", model, "--limit", "1", "--turns", "1", "--max-new-tokens", "24"]
    done = subprocess.run(
        [sys.executable, *words, *few, "--output", str(tmp_path / "out"), "--no-progress"],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())["results"]}
    assert rows.keys() == {"NONE", "my_drafter:prompt_lookup", "my_drafter:lossy"}
    assert rows["my_drafter:prompt_lookup"]["texts"]["equal"] == 1
    assert rows["my_drafter:prompt_lookup"]["accept_length"] <= rows["my_drafter:lossy"]["accept_length"]


def test_load_drafter(my_drafter):
    speculation = make_speculation("my_drafter:lossy", target=toy().target)
    assert speculation.drafter.name == "LOOKUP" and speculation.verify.__name__ == "likely_enough"
    assert load_drafter("my_drafter:prompt_lookup")(toy().target).reads_tokens


SEEN = 16  # tokens of an observation that `recording` keeps


def last_four(params, state, context, observation):
    """Keeps the last four committed tokens of each row."""
    places = context.prefix_length[:, None] + jnp.arange(-4, 0, dtype=jnp.int32)[None, :]
    text = jnp.concatenate([context.committed(places), observation.tokens], axis=1)  # [B, 4 + C]
    last = observation.length[:, None] + jnp.arange(4, dtype=jnp.int32)[None, :]
    return put_rows(state, jnp.take_along_axis(text, last, axis=1), context, observation)


def recording(drafter: Drafter, observe) -> Drafter:
    """A drafter whose state has, for each row, the state of `observe` and the last observation."""

    def init(params, rows, pool):
        return {"last": jnp.full((rows, 4), -1, jnp.int32), "seen": jnp.zeros((rows, 2, SEEN), jnp.int32)} | {
            name: jnp.zeros(rows, jnp.int32) for name in ("start", "length", "calls")
        }

    def watch(params, state, context, seen):
        both = jnp.stack([seen.tokens, seen.next_tokens], axis=1)[:, :, :SEEN]
        new = {
            "seen": jnp.pad(both, ((0, 0), (0, 0), (0, SEEN - both.shape[2]))),
            "start": context.prefix_length,
            "length": seen.length,
            "calls": take_rows(state["calls"], context) + 1,
        }
        updated = {name: put_rows(state[name], new[name], context, seen) for name in new}
        return updated | {"last": observe(params, state["last"], context, seen)}

    return drafter._replace(init=init, observe=watch)


def observed(state: dict, row: int = 0) -> tuple[int, int, list[int], list[int], list[int]]:
    """Calls so far, then of the last one the position, `tokens` and `next_tokens`, and the state of `last_four`."""
    tokens, following = np.asarray(state["seen"])[row, :, : int(state["length"][row])].tolist()
    return int(state["calls"][row]), int(state["start"][row]), tokens, following, state["last"][row].tolist()


@pytest.fixture(scope="module")
def lookup(guide) -> Drafter:
    return recording(guide["prompt_lookup"](None), last_four)


CYCLE = table_model(np.eye(5, dtype=np.float32)[[(row + 1) % 5 for row in range(5)]], window=1)
"""Writes t + 1 after token t, so that any text repeats itself."""
PROMPT = [1, 2, 4, 1, 2, 4, 1, 3, 2, 4, 1]


def test_arguments_of_observe(lookup):
    runner = Runner(CYCLE, lookup, rows=2, chunk=8)
    for row, limit in enumerate((100, 0)):  # drafts that a step may check
        runner.admit(row, PROMPT, Sampling(temperature=0.0, max_tokens=33), draft_limit=limit)
    runner.prefill([PROMPT[:6]] * 2, forced=PROMPT[6])
    assert observed(runner.state.draft) == (1, 0, PROMPT[:6], PROMPT[1:7], PROMPT[2:6])
    runner.prefill([PROMPT[6:]] * 2)
    roots = np.asarray(runner.state.root)[:2].tolist()
    assert observed(runner.state.draft) == (2, 6, PROMPT[6:], [*PROMPT[7:], roots[0]], PROMPT[-4:])

    texts, most = [[*PROMPT, root] for root in roots], 0
    for call in range(3, 11):
        output = runner.step([True, True])
        for row, text in enumerate(texts):
            count, start = int(output.emitted[row]), len(text) - 1
            text += output.tokens[row, :count].tolist()
            committed = text[:-1]
            expected = (call, start, committed[start:], text[start + 1 :], committed[-4:])
            assert observed(runner.state.draft, row) == expected, "the root and the accepted drafts"
        assert output.emitted[1] == 1, "without drafts one token a step"
        most = max(most, int(output.emitted[0]))
    assert most > 2, "some drafts were accepted"
