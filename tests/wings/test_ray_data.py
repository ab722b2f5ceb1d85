"""The batches of a Ray Data actor, without Ray."""

from __future__ import annotations

import numpy as np
import pytest
from generate_helpers import saved_model
from ray_helpers import QUICK

from specjax.cli.generate import RESULT_FIELDS
from specjax.fleet.ray_data import Generate, number_of, rows_of


@pytest.fixture(scope="module")
def generate(tmp_path_factory) -> Generate:
    model = saved_model(tmp_path_factory.mktemp("model"))
    return Generate(QUICK | {"model": model}, {"max_new_tokens": 6, "temperature": 0.9}, keep=["label", "id"])


def test_rows_of_columns():
    messages = np.array([[{"role": "user", "content": "a", "name": None}], None], object)
    batch = {"id": np.array([1.0, np.nan]), "input_ids": np.array([[1, 2], [3, 4]]), "messages": messages}
    assert list(rows_of(batch)) == [
        {"id": 1, "input_ids": [1, 2], "messages": [{"role": "user", "content": "a"}]},
        {"input_ids": [3, 4]},
    ]


def test_row_numbers_do_not_depend_on_the_process():
    assert number_of({"id": "a", "prompt": "x"}) == number_of({"id": "a"}) == 189723792554930
    assert number_of({"prompt": "a", "seed": 1}) == number_of({"seed": 1, "prompt": "a"}) != number_of({"prompt": "a"})


def test_completions_do_not_depend_on_batches(generate):
    rows = [{"id": f"r{i}", "prompt": "abc" * (1 + i % 3), "label": i} for i in range(5)]
    together = generate.complete(rows)
    apart = [generate.complete([row])[0] for row in reversed(rows)][::-1]
    for row, single in zip(together, apart, strict=True):
        differences = {name for name in row if row[name] != single[name]}
        assert differences <= {"spec_verify_ct", "spec_accept_length", "spec_accept_histogram"}
    assert [row["label"] for row in together] == [0, 1, 2, 3, 4]
    assert len({row["seed"] for row in together}) == 5, "equal prompts draw different tokens"
    assert set(together[0]) == {"id", *RESULT_FIELDS, "error", "label"} and together[0]["error"] is None


def test_parameters_and_errors_of_rows(generate):
    rows = [
        {"id": 1, "prompt": "abc", "max_new_tokens": 2, "seed": 7, "ignore_eos": True},
        {"id": 2},
        {"id": 3, "prompt": "abc", "max_new_tokens": -1},
        {"input_ids": [1, 10**6]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    good, empty, wrong, unknown, chat = generate.complete(rows)
    assert (good["completion_tokens"], good["seed"], good["error"]) == (2, 7, None)
    assert empty["id"] == 2 and "exactly one of prompt, messages, input_ids" in empty["error"]
    assert "max_new_tokens" in wrong["error"] and "1000000" in unknown["error"]
    assert chat["error"] is None and chat["text"]


def test_settings_are_checked_first():
    with pytest.raises(ValueError, match="settings: unknown key page"):
        Generate({"page": 1})
    with pytest.raises(ValueError, match="top_p"):
        Generate({}, {"top_p": 7.0})
