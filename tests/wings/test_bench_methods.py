"""Names of methods and sets, settings of a comparison, and their errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from specjax.bench import command, sets
from specjax.bench.command import BenchSettings, make_plan
from specjax.bench.methods import parse_method
from specjax.drafters import Auto, Eagle, Eagle3, Ngram, NoDraft, Standalone
from specjax.settings import parse

METHODS = {
    "none": ("NONE", NoDraft()),
    "ngram:nodes=8,match_type=prob": ("NGRAM nodes=8 match_type=prob", Ngram(nodes=8, match_type="PROB")),
    "AUTO:steps=3,name=ours": ("ours", Auto(steps=3)),
    "EAGLE3:path=a/b,steps=5,topk=8,nodes=32,positions=64": (
        "EAGLE3 5/8/32 path=b positions=64", Eagle3("a/b", steps=5, topk=8, nodes=32, positions=64),
    ),
    "EAGLE:token_map=16384": ("EAGLE token_map=16384", Eagle(token_map="16384")),
    "STANDALONE:model=a/b,quantization=None": (
        "STANDALONE model=b quantization=None", Standalone("a/b", quantization="none"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", METHODS)
def test_algorithms_with_options(text):
    method = parse_method(text)
    name, draft = METHODS[text]
    if isinstance(draft, Eagle):  # a number may be a number or its digits
        assert str(method.draft.token_map) == draft.token_map
    else:
        assert method.draft == draft
    assert (method.name, method.drafter, method.adaptive) == (name, None, None)


def test_custom_methods():
    own = parse_method("a.b:c,adaptive=on")
    assert (own.drafter, own.adaptive, own.name) == ("a.b:c", True, "a.b:c adaptive")
    custom = parse_method("EAGLE3:adaptive=off,verifier=x:y")
    assert (custom.verifier, custom.adaptive, custom.name) == ("x:y", False, "EAGLE3 in every step verifier x:y")
    synthetic = parse_method("EAGLE3:acceptance=0.8/0.7")
    assert (synthetic.rates, synthetic.name) == ((0.8, 0.7), "EAGLE3 synthetic 0.8/0.7")


# Sets


def test_shipped_sets():
    categories = sets.read_sets(["spec_bench"])
    assert [group.name for group in categories] == [f"spec_bench/{name}" for name in sets.SPEC_BENCH]
    assert [len(group.conversations) for group in categories] == [40] * 6
    assert {len(conversation.turns) for conversation in categories[0].conversations} == {2}
    assert [group.name for group in sets.read_sets(["spec_bench/rag", "mt_bench"])] == ["spec_bench/rag", "mt_bench"]
    assert set(sets.set_names()) >= {"mt_bench", "gsm8k", "humaneval", "eagle_sum", "spec_bench"}
    for prompts in sets.read_sets(sets.set_names()):
        assert prompts.conversations and all(conversation.turns for conversation in prompts.conversations)


def test_limits_of_conversations_and_turns():
    (whole,), (part,) = sets.read_sets(["mt_bench"]), sets.read_sets(["mt_bench"], limit=4, turns=1)
    assert [conversation.id for conversation in part.conversations] == [
        whole.conversations[i].id for i in (0, 10, 20, 30)
    ]
    assert {len(conversation.turns) for conversation in part.conversations} == {1}
    assert part.digest != whole.digest


def test_files(tmp_path):
    files = [tmp_path / "a" / "test.jsonl", tmp_path / "b" / "test.jsonl", tmp_path / "all.jsonl"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"id": null, "prompt": "a"}\n\n{"id": 7, "turns": ["b", "c"]}\n')
    prompts = sets.read_sets(map(str, files))
    assert [group.name for group in prompts] == ["test", str(files[1]), str(files[2])]
    assert [*prompts[0].conversations] == [("test-1", ("a",)), ("7", ("b", "c"))]


# Settings


def test_a_configuration_file(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(
        'model = "m"\n[bench]\nmethods = ["none", "NGRAM:nodes=8"]\ntemperatures = [0, 0.7]\n[server]\nport = 1\n'
    )
    defaults = command.Settings()
    _, chosen = parse(command.build_parser(defaults), ["--config", str(file), "--batch-sizes", "2", "4"], defaults)
    assert chosen.bench.methods == ("none", "NGRAM:nodes=8")
    assert (chosen.bench.temperatures, chosen.bench.batch_sizes) == (("0", "0.7"), ("2", "4"))
    assert chosen.model.model == "m"


def test_splits_of_speed_bench(tmp_path):
    """Each category of a split is a set; `messages` and `question_id` are read."""
    rows = [
        {"question_id": "a", "category": "coding", "turns": ["write", "test"]},
        {"question_id": "b", "category": "math", "messages": [{"role": "user", "content": "add"}]},
        {"question_id": "c", "category": "coding", "turns": ["mend"]},
    ]
    (tmp_path / "qualitative.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    coding, math = sets.read_sets(["qualitative"], data=tmp_path)
    assert (coding.name, [one.id for one in coding.conversations]) == ("qualitative/coding", ["a", "c"])
    assert math.conversations == (("b", ("add",)),)
    assert sets.read_sets(["qualitative/math"], data=tmp_path) == [math]


# Refusals

METHOD_ERRORS = {
    "quick": "no method is called quick; there are: AUTO, NONE",
    "EAGLE3:stepz=3": "EAGLE3 has no option stepz; did you mean steps?",
    "NONE:steps=3": "NONE has no option steps",
    "NGRAM:nodes=x": "nodes must be an integer, got 'x'",
    "NGRAM:nodes=900": "must be an integer from 2 to 64, got 900",
    "NGRAM:match_type=ALL": "match_type must be one of BFS, PROB",
    "NGRAM:nodes=4,nodes=5": "nodes is given twice",
    "AUTO:adaptive=maybe": "adaptive must be on or off",
    "STANDALONE:path=a,model=b": "model and path are one option",
    "EAGLE3:steps=1,topk=2,nodes=8": "give 2 candidates",
    "EAGLE3:path": "path needs a value",
    "NGRAM:": "nothing follows",
    "EAGLE3:acceptance=0.5/0.6": "none larger",
    "EAGLE3:acceptance=0.5,verifier=a:b": "exclude each other",
    "EAGLE3:acceptance=x": "could not",
    "none ngram NGRAM": "two are called NGRAM; add name=",
    "EAGLE3:path=./nowhere": "nowhere does not exist",
    "no_such_module:make": "cannot import no_such_module",
}
FILE_ERRORS = {
    "{": "mine.jsonl, line 1 is not JSON",
    '{"turns": []}': "line 1 needs `turns`",
    '{"turns": [1]}': "line 1 needs `turns`",
    "3": "line 1 needs `turns`",
    '{"messages": [{"role": "assistant", "content": "no"}]}': "`messages` of the user",
    "": "holds no prompts",
    '{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}': "two lines have the same id",
}
SETTING_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"sets": ("no_such_set",)}, "has no no_such_set.jsonl"),
    ({"sets": ("nothing.jsonl",)}, "there is no such file"),
    ({"sets": ("spec_bench/x",)}, "spec_bench has no category x"),
    ({"sets": ("mt_bench", "mt_bench")}, "names mt_bench twice"),
    ({"sets": ("spec_bench",), "data": "."}, "has no conversation of mt_bench, translation"),
    ({"sets": ("throughput_1k",), "data": "."}, "has placeholders in place of prompts; run SPEED-Bench's"),
    ({"temperatures": ("warm",)}, "--temperatures must be numbers, got 'warm'"),
    ({"temperatures": ("-1",)}, "--temperatures must be at least 0"),
    ({"batch_sizes": ("0",)}, "--batch-sizes must be at least 1"),
    ({"batch_sizes": ("1", "1")}, "--batch-sizes must be different"),
    ({"baseline": "EAGLE3"}, "--baseline EAGLE3 is none of the methods"),
    ({"methods": ()}, "both need at least one name"),
]
REFUSED = [
    *(({"methods": tuple(texts.split())}, message) for texts, message in METHOD_ERRORS.items()),
    *(({"sets": ("mine.jsonl",), "mine": text}, message) for text, message in FILE_ERRORS.items()),
    *SETTING_ERRORS,
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused(changes, message, tmp_path, monkeypatch):
    """A wrong method, set, file or flag, before a model is loaded."""
    monkeypatch.chdir(tmp_path)
    settings = {name: value for name, value in changes.items() if name != "mine"}
    (tmp_path / "mine.jsonl").write_text(changes.get("mine", ""))
    (tmp_path / "spec_bench.jsonl").write_text('{"prompt": "a", "category": "rag"}\n')
    row = {"category": "rag", "prompt": "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"}
    (tmp_path / "throughput_1k.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(BenchSettings(**{"methods": ("none",), "sets": ("mt_bench",), **settings}))
