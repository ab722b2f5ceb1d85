"""docs/drafters.md: its code runs as it stands, its drafter changes no text, its verifier accepts more."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import make_engine, outcome, shared_engine, toy
from generate_helpers import saved_model
from toy_models import table_model
from train_helpers import environment

import specjax
from specjax import Params, SamplingParams, load_drafter, make_drafter
from specjax.drafters.factories import make_speculation

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
DRAFTER, STEP, VERIFIER, ENGINE = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
COMMAND = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)[0]


@pytest.fixture(scope="module")
def guide() -> dict:
    names: dict = {}
    for number, block in enumerate((DRAFTER, STEP, VERIFIER)):
        exec(compile(block, f"docs/drafters.md, python block {number}", "exec"), names)
    return names


@pytest.fixture
def my_drafter(tmp_path, monkeypatch) -> Path:
    """The file that the guide makes, in a folder on Python's path."""
    (tmp_path / "my_drafter.py").write_text(DRAFTER + VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_drafter", None)


def lines(block: str) -> int:
    return len([line for line in block.splitlines() if line.strip()])


def test_the_examples_are_short():
    assert lines(DRAFTER) <= 35
    assert lines(VERIFIER) <= 26


def test_in_the_bare_step(guide):
    # A wild text over five tokens: windows come back, but what followed them is often only the second best.
    table = np.random.default_rng(3).normal(0, 0.7, (997, 5)).astype(np.float32)
    model = table_model(table, window=4)
    params, prompt = Params(model.params), [1, 2, 3, 1, 2, 3, 1, 2]

    def run(drafter, **options):
        return guide["generate"](model.target, params, drafter, prompt, 60, **options)

    plain, steps = run(make_drafter("NONE"))
    assert steps == 59
    drafted, fewer = run(guide["prompt_lookup"](model.target))
    assert drafted == plain, "lossless"
    assert fewer < steps
    lossy, least = run(guide["prompt_lookup"](model.target), verify=guide["likely_enough"])
    assert len(lossy) == len(plain)
    assert least < fewer, "it accepts more"


def test_in_an_engine_that_samples(guide):
    params = SamplingParams(max_new_tokens=40, temperature=0.9, seed=3)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9] * 13]
    expected = shared_engine("NONE").generate(prompts, params)
    made = make_speculation(guide["lossy"], toy().target)
    found = make_engine(toy(), made.drafter).generate(prompts, params)
    assert [outcome(done) for done in found] == [outcome(done) for done in expected]
    lossy = make_engine(toy(), made.drafter, verify=made.verify).generate(prompts, params)
    assert [len(done.output_ids) for done in lossy] == [len(done.output_ids) for done in found]
    assert sum(done.spec_verify_ct for done in lossy) < sum(done.spec_verify_ct for done in found)


@pytest.mark.parametrize(
    "built_in", [pytest.param(True, marks=[pytest.mark.real_model, pytest.mark.slow]), False], ids=["built in", "tiny"]
)
def test_with_a_model(guide, built_in, tmp_path, monkeypatch, capsys):
    if not built_in:
        model = saved_model(tmp_path, max_position_embeddings=256)
        config = specjax.EngineConfig(max_running_requests=1, max_total_tokens=256, chunked_prefill_size=16)
        load = partial(specjax.Engine.from_pretrained, model, config=config, compilation_cache=False)
        monkeypatch.setattr(specjax.Engine, "from_pretrained", load)
    exec(compile(ENGINE, "docs/drafters.md, the engine", "exec"), guide)
    (lossless, text), (lossy, _) = (line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    plain = specjax.Engine.from_pretrained(draft="NONE", progress=False).generate(guide["prompt"], guide["params"])
    assert text == repr(plain.text)
    assert 1 <= float(lossless) <= float(lossy)
    assert float(lossless) > 1 or not built_in, "a random model repeats nothing"


@pytest.mark.process
def test_in_the_benchmark(my_drafter, tmp_path):
    path = os.pathsep.join([str(my_drafter), str(ROOT), str(ROOT / "kernels")])
    words = COMMAND.replace("PYTHONPATH=. python", "").split()
    model = saved_model(tmp_path, max_position_embeddings=1024)
    few = ["--model", model, "--limit", "1", "--turns", "1", "--max-new-tokens", "24", "--timed", "0"]
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


def test_a_name_leads_to_the_function(my_drafter):
    made = make_speculation("my_drafter:lossy", toy().target)
    assert made.drafter.name == "LOOKUP" and made.verify.__name__ == "likely_enough"
    assert load_drafter("my_drafter:prompt_lookup")(toy().target).reads_tokens


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_drafter:", "write module:function"),
        ("./my_drafter.py:lossy", "write module:function"),
        ("no_such_module:make", r"cannot import no_such_module \(No module named 'no_such_module'\).*PYTHONPATH"),
        ("my_drafter:los", "my_drafter has no function los; it defines: prompt_lookup, likely_enough, lossy"),
        ("my_drafter:DEPTH", "my_drafter has a int, no function, named DEPTH"),
    ],
)
def test_names_that_lead_nowhere(my_drafter, name, problem):
    with pytest.raises(ValueError, match=f"drafter '{name}': {problem}"):
        load_drafter(name)


def test_a_factory_returns_a_drafter():
    def broken(target):
        return 7

    with pytest.raises(TypeError, match=r"drafter '.*broken' returned 7; it must return a Drafter or a Speculation"):
        make_speculation(broken, toy().target)
