"""An engine without the packages of features that it does not use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from engine_helpers import VOCABULARY, tokenizer
from tiny_checkpoints import save_llama
from tiny_heads import save_head
from train_helpers import environment

OPTIONAL = ("re2", "llguidance", "gguf", "fastapi", "uvicorn", "starlette", "pydantic", "pydantic_core",
            "prometheus_client", "numba")  # fmt: skip
"""Packages that an engine on a GPU does not need."""

WITHOUT = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # as if it were not installed
from pathlib import Path
from specjax import Eagle3, Engine, EngineConfig, Grammar, SamplingParams
config = EngineConfig(max_running_requests=2, context_length=64, max_total_tokens=256)
drafts = {{"NONE": "NONE", "NGRAM": "NGRAM", "EAGLE3": Eagle3(sys.argv[2], steps=2, topk=1, nodes=3)}}
texts = {{}}
for name, draft in drafts.items():
    engine = Engine.from_pretrained(sys.argv[1], draft=draft, dtype="float32", config=config, progress=False)
    texts[name] = engine.generate([5, 6, 7], SamplingParams(max_new_tokens=12, temperature=0.0)).output_ids
assert len(texts["NONE"]) == 12 and texts["NONE"] == texts["NGRAM"] == texts["EAGLE3"], texts
Path(sys.argv[1], "model.gguf").write_bytes(b"GGUF")
tries = (
    lambda: engine.generate("a", SamplingParams(max_new_tokens=4, grammar=Grammar("regex", "a+"))),
    lambda: engine.generate("a", SamplingParams(max_new_tokens=4, stop_regex=["a+"])),
    lambda: Engine.from_pretrained(str(Path(sys.argv[1], "model.gguf"))),
)
for use in tries:
    try:
        use()
    except ValueError as error:
        print(error)
from specjax.serve.__main__ import main
print(main([]))
"""


@pytest.mark.process
def test_engine_without_packages_of_other_features(tmp_path):
    """Each is needed where it is used, and named with the command that installs it."""
    save_llama(tmp_path / "model", vocab_size=VOCABULARY, num_hidden_layers=3)
    tokenizer().save_pretrained(tmp_path / "model")
    width = json.loads((tmp_path / "model" / "config.json").read_text())["hidden_size"]
    reads = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}}
    wide = {"target_hidden_size": width, "hidden_size": width, "target_vocab_size": VOCABULARY}
    save_head(tmp_path / "head", "eagle3", config=reads, **wide)
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "model"), str(tmp_path / "head")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    *lines, status = done.stdout.splitlines()
    for line, package in zip(lines, ("llguidance", "google-re2", "gguf"), strict=True):
        assert f"need {package}, which is not installed: pip install {package}" in line
    assert status == "2" and "specjax serve: servers need fastapi, which" in done.stderr.splitlines()[-1]
