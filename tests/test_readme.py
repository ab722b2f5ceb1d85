"""The README's examples run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.real_model
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_python_example_runs(index, capsys):
    names: dict = {}
    exec(compile(BLOCKS[index], f"README.md, python block {index}", "exec"), names)
    printed = capsys.readouterr().out
    assert len(printed.split()) > 5
    if "tokens" in names:  # the step without the engine: the same text as the engine's
        from specjax import Engine, EngineConfig, SamplingParams

        engine = Engine.from_pretrained(
            algorithm="NONE", progress=False, compilation_cache=False, config=EngineConfig(max_running_requests=1)
        )
        done = engine.generate(names["prompt"], SamplingParams(max_new_tokens=40, ignore_eos=True))
        assert names["tokens"] == done.output_ids


def test_there_are_examples():
    assert len(BLOCKS) == 2


def test_the_example_prompts_are_the_ones_shown():
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        assert json.loads(line)
        assert line in shown
