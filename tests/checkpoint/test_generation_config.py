"""generation_config.json: the ids that end a text, and the publisher's sampling parameters."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from specjax.checkpoint import CheckpointError, ModelFiles, sampling_defaults, stop_token_ids
from specjax.checkpoint.hf_config import NEUTRAL


@pytest.fixture
def model(tmp_path):
    """A model's files with this config.json and generation_config.json."""

    def files(config: dict[str, Any], generation: Any = None) -> ModelFiles:
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelFiles("it", Path(tmp_path), config, ())

    return files


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_eos", "expected"),
    [
        ({}, None, None, ()),
        ({}, None, 7, (7,)),
        ({"eos_token_id": 2}, None, None, (2,)),
        ({"eos_token_id": 2}, {}, 7, (2, 7)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [4, 2, 4]}, 7, (4, 2, 7)),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 0}, 2, (0, 2, 3)),
        ({"eos_token_id": []}, {"eos_token_id": []}, None, ()),
        ({}, {}, 300, ()),
    ],
)
def test_stop_token_ids(model, config, generation, tokenizer_eos, expected):
    files = model(config, generation)
    assert stop_token_ids(files, SimpleNamespace(eos_token_id=tokenizer_eos), 300) == expected
    assert set(stop_token_ids(files)) == set(expected) - ({tokenizer_eos} - set(stop_token_ids(files)))


def test_stop_token_ids_of_the_harmony_format(model):
    """Also where the files name only the end of an answer."""
    added = {"<|channel|>": 5, "<|return|>": 2, "<|call|>": 12, "<|end|>": 7}
    tokenizer = SimpleNamespace(eos_token_id=2, get_added_vocab=lambda: added)
    assert stop_token_ids(model({"eos_token_id": 2}, None), tokenizer, 300) == (2, 12)
    assert stop_token_ids(model({"eos_token_id": 2}, None), tokenizer, 12) == (2,)


@pytest.mark.parametrize("value", ["2", True, -1, 300, 2.0, [2, "3"], [False], [None], {"a": 1}, 10**30])
def test_wrong_stop_token_ids(model, value):
    wrong = {"eos_token_id": value}
    for name, configs in (("config.json", (wrong,)), ("generation_config.json", ({}, wrong))):
        with pytest.raises(CheckpointError, match=rf"/{name}: eos_token_id is .*from 0 to 299"):
            stop_token_ids(model(*configs), None, 300)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"temperature": 0.2, "top_p": 0.9}, {"temperature": 0.2, "top_p": 0.9}),
        ({"temperature": 1, "top_k": 50, "do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"top_k": 0, "min_p": 0, "repetition_penalty": 1.1}, {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.1}),
        ({"top_k": 40.0, "temperature": None, "max_length": 4096, "use_cache": False}, {"top_k": 40}),
        ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2, "do_sample": False},
         {"temperature": 0.0, "repetition_penalty": 1.2}),
        ({"top_k": 5, "num_beams": 1, "length_penalty": 0.5, "transformers_version": "5.0"}, {"top_k": 5}),
    ],
)  # fmt: skip
def test_sampling_defaults(model, generation, expected):
    defaults = sampling_defaults(model({}, generation))
    assert defaults == expected
    assert all(type(value) is type(expected[key]) for key, value in defaults.items())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("temperature", value) for value in ("0.6", True, -0.1, 1e5, float("nan"), float("inf"), [1], 10**400)),
        *(("top_p", value) for value in (0, 1.1, -1, "1", False)),
        *(("top_k", value) for value in (-2, 1.5, "5", True, 2**31)),
        *(("min_p", value) for value in (-0.1, 1.5, {})),
        *(("repetition_penalty", value) for value in (0, -1, 2.5, "1")),
        ("do_sample", "yes"),
        ("do_sample", 1),
    ],
)
def test_values_out_of_range(model, key, value):
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {key} is .* needed"):
        sampling_defaults(model({}, {key: value}))


CHANGES = {
    "suppress_tokens": [5], "begin_suppress_tokens": [220, 50256], "forced_bos_token_id": 0, "forced_eos_token_id": 2,
    "bad_words_ids": [[3]], "no_repeat_ngram_size": 3, "sequence_bias": [[[3], 1.0]], "min_length": 5,
    "min_new_tokens": True, "num_beams": 4, "typical_p": 0.9, "guidance_scale": 1.5, "penalty_alpha": 0.6,
    "stop_strings": ["end"], "watermarking_config": {"a": 1}, "epsilon_cutoff": 3e-4, "token_healing": True,
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), CHANGES.items())
def test_unsupported_fields_are_refused(model, tmp_path, key, value):
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {key} is .*sampling_defaults='openai'"):
        sampling_defaults(model({}, {key: value}))
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=rf"/config.json: {key} is "):
        sampling_defaults(model({key: value}))
    assert sampling_defaults(model({key: value}, {"top_k": 3})) == {"top_k": 3}, "config.json is not read then"


def test_neutral_values(model):
    assert sampling_defaults(model({}, dict.fromkeys(NEUTRAL))) == {}
    for generation in ({key: values[0] for key, values in NEUTRAL.items() if values}, GenerationConfig().to_dict()):
        assert sampling_defaults(model({}, generation)) == {}
    assert sampling_defaults(model({}, {"no_repeat_ngram_size": 0.0, "typical_p": 1})) == {}
    sampling = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
    assert sampling_defaults(model({}, sampling | {"typical_p": 1.0, "num_beams": 1})) == sampling
