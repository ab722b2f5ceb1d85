"""The examples of the README run unchanged."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from server_helpers import running

from specjax import Engine, EngineConfig, checkpoint

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
CURL = next(block for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) if "curl" in block)

ADDRESS = "http://127.0.0.1:30000"


@pytest.mark.real_model
def test_python_example(capsys):
    assert len(BLOCKS) == 1
    names: dict = {"always": EngineConfig(adaptive=False)}  # the choice depends on measured times
    block = BLOCKS[0].replace('-instruct")', '-instruct", config=always)', 1)
    assert "config=always" in block
    exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert len(printed.split()) > 5
    accept = float(re.search(r"# an accept length of about ([\d.]+)", BLOCKS[0])[1])
    assert names["done"].spec_accept_length == pytest.approx(accept, abs=0.05)


@pytest.mark.real_model
def test_curl_example():
    engine = Engine.from_pretrained(draft="NONE", progress=False)
    with running(engine, model=checkpoint.BUILT_IN_MODEL) as server:
        assert ADDRESS in CURL
        done = subprocess.run(
            CURL.replace(ADDRESS, server.base), shell=True, capture_output=True, check=True, timeout=60
        )
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
