"""docs/drafters.md and examples/medusa.py: their code runs unchanged, and the verifier accepts more."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from eagle_oracle import start
from engine_helpers import make_engine, toy
from generate_helpers import saved_model
from toy_models import Runner, tiny_llama
from train_helpers import environment

import specjax
from specjax import SamplingParams, StepConfig, load_drafter, make_speculation

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
MEDUSA = (ROOT / "examples" / "medusa.py").read_text(encoding="utf-8")
DRAFTER, KEYS, COUNTER, VERIFIER, ENGINE = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
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
        ({"draft": "my_drafter:prompt_lookup"}, True),
        ({"drafter": "prompt_lookup", "adaptive": True}, False),
        ({"drafter": "lossy", "adaptive": True}, True),
        ({"draft": "NGRAM", "verify": "likely_enough"}, True),
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


def test_counter_of_steps(guide):
    own = {name: function for name, function in run(COUNTER).items() if name in ("init", "observe")}
    drafter = guide["prompt_lookup"](toy().target)._replace(**own)
    engine = make_engine(toy(), drafter, max_running_requests=1)
    for count in (9, 5):
        done = engine.generate("hello hello", SamplingParams(max_new_tokens=count, ignore_eos=True))
        assert int(engine.state.draft["steps"][0]) == done.spec_verify_ct > 0


def test_similar_keys():
    """Drafts follow the committed token whose key has the largest product with the last one's."""
    toy = tiny_llama()
    drafter = run(KEYS)["similar_key"](toy.target)
    specjax.check_drafter(drafter, toy.target, specjax.Params(toy.params), values=True)
    config = StepConfig(nodes=drafter.width, trace=True)
    runner = Runner(toy, drafter, rows=2, config=config)
    texts = start(runner)
    drafted = 0
    for _ in range(4):
        before = {row: runner.committed(row).reshape(48, -1)[: len(text) - 1] for row, text in texts.items()}
        output = runner.step([True, True])
        for row, text in texts.items():
            count, keys = len(text) - 1, before[row]  # committed tokens
            valid = output.trace.tree.valid[row].sum() - 1
            assert valid == (drafter.depth if count > 1 else 0)
            if valid:
                best = int(np.argmax(keys[:-1] @ keys[-1]))
                wanted = [text[best + 2 + i % (count - 1 - best)] for i in range(valid)]
                assert output.trace.tree.tokens[row, 1:].tolist() == wanted
                drafted += 1
            text += output.tokens[row, : output.emitted[row]].tolist()
    assert drafted >= 6


def test_without_the_engine(medusa):
    names = medusa
    tokens, hidden = names["tokens"], names["hidden"]
    assert names["predicted"][0, len(names["prompt"]) - 1 : -1].tolist() == tokens, "hidden states equal the steps'"
    assert names["layers"].shape == (*hidden.shape[:2], 2 * hidden.shape[2])
    assert names["drafted"] == names["done"].output_ids == tokens, "lossless"
    assert names["taken"] < len(tokens) - 1, "the trained heads are accepted"
    assert names["done"].spec_verify_ct == names["taken"]


@pytest.mark.parametrize(
    "built_in", [pytest.param(True, marks=[pytest.mark.real_model, pytest.mark.slow]), False], ids=["built in", "tiny"]
)
def test_with_a_model(my_drafter, built_in, tmp_path, monkeypatch, capsys):
    if not built_in:
        model = saved_model(tmp_path, max_position_embeddings=256)
        config = specjax.EngineConfig(max_running_requests=1, max_total_tokens=256, chunked_prefill_size=16)
        load = partial(specjax.Engine.from_pretrained, model, config=config, compilation_cache=False)
        monkeypatch.setattr(specjax.Engine, "from_pretrained", load)
    run(ENGINE)
    (lossless, text), (lossy, _) = (line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert len(text) > 20
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
